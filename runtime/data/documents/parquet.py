"""Documents of a .parquet file: one per row, in its column "text". Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from specc.runtime.data.documents.files import bounded
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.errors import EnvironmentFailure

BATCH_ROWS = 256  # rows in memory at once, besides the row group that the file stores together


def parquet_rows(path: Path) -> Iterator[bytes]:
    """Yields the documents of a file, in the order of its rows.

    Raises:
        EnvironmentFailure: pyarrow is not installed.
        DataError: the file has no column "text" of strings, or a row has no text.
        DataIntegrityError: the file is damaged.
    """
    if find_spec("pyarrow") is None:
        raise EnvironmentFailure(f"{path}: a .parquet file needs pyarrow", "pip install 'specc[parquet]'")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            kind = str(schema.field("text").type) if "text" in schema.names else "missing"
            if kind not in ("string", "large_string"):
                hint = 'write the documents to a column of strings named "text"'
                raise DataError(f'{path}: column "text" is {kind}; the columns are {", ".join(schema.names)}', hint)
            row = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=["text"]):
                for value in batch.column(0):
                    row += 1
                    yield bounded(_utf8(value, f"{path}, row {row}"), f"{path}, row {row}")
    except pyarrow.ArrowInvalid as error:
        raise DataIntegrityError(f"{path}: damaged .parquet file: {error}", "copy the file again") from None


def _utf8(value: object, where: str) -> bytes:
    try:
        text = value.as_py()  # type: ignore[attr-defined]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start}", "correct the row or remove it") from None
    if text is None:
        raise DataError(f'{where}: "text" is null', "give the row a text, or remove it")
    return bytes(text.encode())
