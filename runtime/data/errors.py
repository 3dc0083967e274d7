"""Errors about data: what is wrong, and what the user can do."""

from specc.runtime.errors import RuntimeFailure


class DataError(RuntimeFailure):
    """A source, tokenizer or stream cannot be used as asked (exit code 2).

    Attributes:
        message: what is wrong and where (file and line if there is one).
        hint: what to do about it; empty if there is nothing to add.
    """

    exit_code = 2


class DataIntegrityError(DataError):
    """Bytes on disk are not what they were written as: cut, damaged, or changed in use (exit code 5)."""

    exit_code = 5


class LineError(DataError):
    """One of several lines that cannot be read; `row` counts from 0."""

    def __init__(self, row: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.row = row
