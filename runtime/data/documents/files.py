"""Opens the files of documents, plain or compressed."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from pathlib import Path

from specc.runtime.data.errors import DataError

COMPRESSIONS = (".xz", ".gz")
# A whole document is in memory at once, and some tokenizers need thirty times its size for its tokens.
DOCUMENT_BYTES = 64 * 1024 * 1024
READ_ERRORS = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


def open_file(path: Path) -> io.BufferedIOBase:
    """Opens a file that may be compressed. Reading raises OSError, or one of READ_ERRORS if the file is damaged."""
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".gz":
        return gzip.open(path)
    return open(path, "rb")


def bounded(document: bytes, where: str | Path) -> bytes:
    """Returns the document. Raises DataError if it has more than DOCUMENT_BYTES."""
    if len(document) > DOCUMENT_BYTES:
        hint = "split it, or change the boundaries between documents with `specc data pack --bounds`"
        raise DataError(f"{where}: a document has more than {DOCUMENT_BYTES:,} bytes", hint)
    return document
