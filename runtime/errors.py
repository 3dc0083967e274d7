"""Errors of the runtime. Each error has a message, a hint and an exit code."""

from pathlib import Path

from specc.compiler.errors import FULL


class RuntimeFailure(Exception):
    """The base class of errors that the user can fix.

    Attributes:
        message: the problem and its location.
        hint: a suggested remedy; empty if there is none.
        exit_code: the exit code of a command that ends with this error.
        code: the code of the error: a key of `specc.compiler.errors.codes.CODES`.
    """

    exit_code = 4
    code = "R001"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


class EnvironmentFailure(RuntimeFailure):
    """Raised if the machine lacks something, such as a GPU, a compiler, a package, disk space, or write access to a
    file.
    """

    code = "E001"
    exit_code = 3


class RunFailure(RuntimeFailure):
    """Raised if training, quantization, evaluation or export could not finish."""


class ExportError(RuntimeFailure):
    """Raised if the path of an export exists or cannot be used, or if the run cannot be exported in this format."""

    code = "U012"
    exit_code = 2


class QuantizeError(RunFailure):
    """Raised if a parameter cannot be quantized as requested, or if no allocation of bits fits the budget."""

    code = "R002"


class IntegrityError(RuntimeFailure):
    """Raised if a file is damaged, truncated, or does not match its header. No content of the file is returned."""

    code = "I001"
    exit_code = 5


def cannot_write(path: Path, error: OSError, hint: str = "name another path") -> EnvironmentFailure:
    """Returns the error for a write to `path` that failed with `error`. If the disk is full, the hint also says to free
    some space.
    """
    hint = f"free some space, or {hint}" if error.errno in FULL else hint
    return EnvironmentFailure(f"cannot write {path}: {error.strerror or error}", hint)
