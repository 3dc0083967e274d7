"""Errors about data: what is wrong, and what the user can do."""

from __future__ import annotations


class DataError(Exception):
    """A source, tokenizer or stream cannot be used as asked.

    Attributes:
        message: what is wrong and where (file and line if there is one).
        hint: what to do about it; empty if there is nothing to add.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint


class DataIntegrityError(DataError):
    """Bytes on disk are not what they were written as: cut, damaged, or changed in use (exit code 5)."""
