"""Opens document files, which may be compressed."""

import gzip
import io
import lzma
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specc.runtime.data.errors import DataError
from specc.runtime.errors import EnvironmentFailure

COMPRESSIONS = (".xz", ".gz", ".zst")
# A document is read into memory as a whole. Some tokenizers need thirty times the size of a document in memory.
DOCUMENT_BYTES = 64 * 1024 * 1024
READ_ERRORS = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


def open_file(path: Path) -> io.BufferedIOBase:
    """Opens a file that may be compressed.

    Raises DataError if the file is a named pipe. Raises EnvironmentFailure if the file is a .zst file and pyarrow is
    not installed. Reading from the returned object raises one of READ_ERRORS if the file is damaged, or OSError if the
    file cannot be read.
    """
    if path.is_fifo():  # opening it could wait for a writer forever
        raise DataError(f"{path}: this is a named pipe", "data are read more than once: write them to a file first")
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstd(path), 1 << 20)
    return open(path, "rb")


class _Zstd(io.RawIOBase):
    """The decompressed content of a file in the format Zstandard. Reading from a damaged file raises EOFError."""

    def __init__(self, path: Path) -> None:
        require_pyarrow(path)
        import pyarrow

        self._source = pyarrow.input_stream(str(path), compression="zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            part = self._source.read(len(buffer))
        except OSError as error:
            raise EOFError(str(error)) from None
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._source.close()
        super().close()


def require_pyarrow(path: Path) -> None:
    """Raises EnvironmentFailure if pyarrow is not installed. The message says that the file `path` needs pyarrow."""
    if find_spec("pyarrow") is None:
        raise EnvironmentFailure(f"{path}: a {path.suffix} file needs pyarrow", "pip install 'specc[parquet]'")


def bounded(document: bytes, where: str | Path) -> bytes:
    """Returns the document unchanged. Raises DataError if the document has more than DOCUMENT_BYTES bytes; the message
    names the place `where`.
    """
    if len(document) > DOCUMENT_BYTES:
        hint = "split it, or change the boundaries between documents with `specc data pack --bounds`"
        raise DataError(f"{where}: a document has more than {DOCUMENT_BYTES:,} bytes", hint)
    return document
