"""Reads .parquet and .arrow files, which have one document per row, in the column "text". Needs pyarrow."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specc.runtime.data.documents.files import bounded, require_pyarrow
from specc.runtime.data.errors import DataError, DataIntegrityError

BATCH_ROWS = 256  # the number of rows that are converted at once; the file reader also holds their row group in memory


def parquet_rows(path: Path) -> Iterator[bytes]:
    """Yields the documents of a .parquet file, in the order of its rows.

    Raises:
        EnvironmentFailure: if pyarrow is not installed.
        DataError: if the file has no column "text" of strings, or a row has no text.
        DataIntegrityError: if the file is damaged.
    """
    require_pyarrow(path)
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _require_text(path, file.schema_arrow)
            yield from _rows(path, (batch.column(0) for batch in file.iter_batches(BATCH_ROWS, columns=["text"])))
    except pyarrow.ArrowInvalid as error:
        raise DataIntegrityError(f"{path}: damaged .parquet file: {error}", "copy the file again") from None


def arrow_rows(path: Path) -> Iterator[bytes]:
    """Yields the documents of an .arrow file that Hugging Face `datasets` saved, in the order of its rows.

    The file is mapped into memory and read batch by batch. Raises the errors that `parquet_rows` lists.
    """
    require_pyarrow(path)
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as memory:
            try:
                reader = ipc.open_stream(memory)
                batches = iter(reader)
            # The file format of Arrow ends with an index. The stream format of Arrow has no index.
            except pyarrow.ArrowInvalid:
                file = ipc.open_file(memory)
                reader, batches = file, (file.get_batch(index) for index in range(file.num_record_batches))
            _require_text(path, reader.schema)
            yield from _rows(path, (batch.column("text") for batch in batches))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataIntegrityError(f"{path}: damaged .arrow file: {error}", "copy the file again") from None


def _require_text(path: Path, schema: Any) -> None:
    kind = str(schema.field("text").type) if "text" in schema.names else "missing"
    if kind not in ("string", "large_string"):
        hint = 'write the documents to a column of strings named "text"'
        raise DataError(f'{path}: column "text" is {kind}; the columns are {", ".join(schema.names)}', hint)


def _rows(path: Path, columns: Iterable[Any]) -> Iterator[bytes]:
    row = 0
    for column in columns:
        for value in column:
            row += 1
            yield bounded(_utf8(value, f"{path}, row {row}"), f"{path}, row {row}")


def _utf8(value: object, where: str) -> bytes:
    try:
        text = value.as_py()  # type: ignore[attr-defined]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start}", "correct the row or remove it") from None
    if text is None:
        raise DataError(f'{where}: "text" is null', "give the row a text, or remove it")
    return bytes(text.encode())
