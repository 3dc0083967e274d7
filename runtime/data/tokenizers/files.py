"""Helper functions for the modules that read tokenizer files."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError
from specc.runtime.errors import EnvironmentFailure


def missing_package(path: str | Path, package: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"{path}: {package} is not installed", f"pip install {package}, or 'specc[train]'")


def valid_text(name: str, text: bytes) -> str:
    """Decodes a document. Raises DataError, with the name of the tokenizer, if the document is not valid UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: the document is not valid UTF-8 at byte {error.start}",
            "convert the document to UTF-8, or use a tokenizer that accepts any bytes: `bytes` or a .tiktoken file",
        ) from None


def byte_offsets(text: str) -> npt.NDArray[np.int64]:
    """Returns the byte offset in UTF-8 of each character and of the end of the text, i64 [len(text) + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])


def read_file(path: Path) -> bytes:
    """Returns the content of a tokenizer file. Raises DataError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def id_dtype(vocab: int) -> type[np.uint16] | type[np.uint32]:
    """Returns uint16 if it can hold all ids below `vocab`, and uint32 otherwise."""
    return np.uint16 if vocab <= 1 << 16 else np.uint32


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
