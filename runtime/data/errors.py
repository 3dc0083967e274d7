"""Errors about data. Each has a message and a hint for the user."""

from specc.runtime.errors import RuntimeFailure


class DataError(RuntimeFailure):
    """Raised if a source, tokenizer or stream cannot be used as requested (exit code 2).

    Attributes:
        message: the problem and its location (file and line, if any).
        hint: a suggested remedy; empty if there is none.
    """

    code = "U005"
    exit_code = 2


class DataIntegrityError(DataError):
    """Raised if a file on disk is truncated or damaged, or changed while it was in use (exit code 5)."""

    code = "I002"
    exit_code = 5


class LineError(DataError):
    """Raised if a line of a file cannot be used. `row` is the index of the line, counted from 0."""

    code = "U006"

    def __init__(self, row: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.row = row
