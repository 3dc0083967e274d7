"""Errors of the runtime. Each has a message, a hint and an exit code."""

import errno
from pathlib import Path

from specc.compiler.errors import FULL


class RuntimeFailure(Exception):
    """An error that a user can act on.

    Attributes:
        message: the problem and its location.
        hint: a suggested remedy; empty if there is none.
        exit_code: exit code of the command that ends with this error.
    """

    exit_code = 4

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


class EnvironmentFailure(RuntimeFailure):
    """The machine lacks a requirement: a GPU, a compiler, a package, or disk space."""

    exit_code = 3


class RunFailure(RuntimeFailure):
    """Training, quantization, evaluation or export could not finish."""

    exit_code = 4


def cannot_write(path: Path, error: OSError, hint: str = "free some space or name another path") -> RuntimeFailure:
    """Returns the error for a failed write to `path`: EnvironmentFailure if the disk is full, else RunFailure."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (EnvironmentFailure if full else RunFailure)(f"cannot write {path}: {error.strerror or error}", hint)


class QuantizeError(RunFailure):
    """A parameter cannot be quantized as requested, or no allocation of bits fits the budget."""


class IntegrityError(RuntimeFailure):
    """A file is damaged, truncated, or does not match its header. No part of its content has been returned."""

    exit_code = 5


def write_failure(path: Path, error: OSError, elsewhere: str) -> EnvironmentFailure:
    """Returns the error for a failed write to `path`.

    `elsewhere` is the hint that explains how to choose another location, such as `name another --out`.
    """
    message = f"{path}: cannot be written: {error.strerror or error}"
    return EnvironmentFailure(message, f"free some space, or {elsewhere}" if error.errno in FULL else elsewhere)
