"""Errors about data. Each error has a message and a hint for the user."""

from specc.runtime.errors import RuntimeFailure


class DataError(RuntimeFailure):
    """Raised if a text source, a tokenizer or a token stream cannot be used as requested (exit code 2).

    Attributes:
        message: the problem, and the file and line of the problem if they are known.
        hint: a suggested remedy; empty if there is none.
    """

    code = "U005"
    exit_code = 2


class DataIntegrityError(DataError):
    """Raised if a file is truncated, damaged, or was changed while it was in use (exit code 5)."""

    code = "I002"
    exit_code = 5


class LineError(DataError):
    """Raised if a line of a file cannot be used. `row` is the index of the line, counted from 0."""

    code = "U006"

    def __init__(self, row: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.row = row
