"""The errors of the runtime: a message, a hint, an exit code."""

import errno
from pathlib import Path

from specc.compiler.errors import FULL


class RuntimeFailure(Exception):
    """An error that a user can act on.

    Attributes:
        message: what is wrong, and where.
        hint: what to do; empty if there is nothing to add.
        exit_code: of the command that ends with it.
    """

    exit_code = 4

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


class EnvironmentFailure(RuntimeFailure):
    """The machine lacks something: a GPU, a compiler, a package, disk space."""

    exit_code = 3


class RunFailure(RuntimeFailure):
    """Training, quantization, evaluation or export could not finish."""

    exit_code = 4


def cannot_write(path: Path, error: OSError, hint: str = "free some space or name another path") -> RuntimeFailure:
    """The failure to write `path`: of the machine where its disk is full, else of the run."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (EnvironmentFailure if full else RunFailure)(f"cannot write {path}: {error.strerror or error}", hint)


class QuantizeError(RunFailure):
    """A parameter cannot be quantized as asked, or no allocation of bits fits the budget."""


class IntegrityError(RuntimeFailure):
    """A file is damaged, truncated, or not what its header says. Nothing of it has been handed out."""

    exit_code = 5


def write_failure(path: Path, error: OSError, elsewhere: str) -> EnvironmentFailure:
    """The failure of a write to `path`; `elsewhere` says how to choose another place, such as `name another --out`."""
    message = f"{path}: cannot be written: {error.strerror or error}"
    return EnvironmentFailure(message, f"free some space, or {elsewhere}" if error.errno in FULL else elsewhere)
