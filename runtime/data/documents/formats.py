"""Reads the documents of a file in the format that its suffix names: text, source code, jsonl, parquet or arrow."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from specc.runtime.data.documents import files
from specc.runtime.data.documents.files import COMPRESSIONS, READ_ERRORS, bounded, open_file
from specc.runtime.data.documents.jsonl import json_lines
from specc.runtime.data.documents.parquet_and_arrow import arrow_rows, parquet_rows
from specc.runtime.data.documents.text import is_blank, is_separator, separated
from specc.runtime.data.errors import DataError, DataIntegrityError

Bounds = Literal["endoftext", "blank-line", "record", "file"]

# The default boundaries between documents, by suffix. A record is a line of .jsonl or a row of a table.
KINDS: dict[str, Bounds] = {".txt": "endoftext", ".md": "file", ".py": "file", ".jsonl": "record"}
TABLES: Mapping[str, Callable[[Path], Iterator[bytes]]] = {".parquet": parquet_rows, ".arrow": arrow_rows}
KINDS |= dict.fromkeys(TABLES, "record")
SUPPORTED = (
    f"readable: {', '.join(KINDS)}, and all but {' and '.join(TABLES)} also compressed as {', '.join(COMPRESSIONS)}; "
    "token shards end in .bin"
)


def kind_of(path: Path) -> str:
    """Returns the format of a file as a suffix, such as `.txt` for `a.txt` and `a.txt.xz`. Returns an empty string if
    the format is not supported.
    """
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix if suffix in KINDS and (suffix not in TABLES or suffix == path.suffix) else ""


def read_documents(path: Path, bounds: Bounds | None = None) -> Iterator[bytes]:
    """Yields the documents of a file, including empty documents.

    `bounds` is the rule that divides the file into documents. None selects the default of the file format. In a .jsonl,
    .parquet or .arrow file, each record is one document. A large .txt file may be read twice, because the first pass
    only searches for a separator.

    Raises DataError if the file cannot be read, a record is invalid, or a document has more than DOCUMENT_BYTES. Raises
    DataIntegrityError if a compressed file is damaged, and EnvironmentFailure if a .parquet, .arrow or .zst file needs
    pyarrow.
    """
    kind = kind_of(path)
    where = KINDS[kind] if bounds is None or KINDS[kind] == "record" else bounds
    try:
        if kind in TABLES:
            yield from TABLES[kind](path)
            return
        with open_file(path) as file:
            if where == "record":
                yield from json_lines(file, path)
            elif where == "file":
                yield bounded(file.read(files.DOCUMENT_BYTES + 1), path)
            else:
                ends = is_separator if where == "endoftext" else is_blank
                yield from separated(file, path, ends, may_run=bounds is None)
    except READ_ERRORS as error:
        what = str(error) or type(error).__name__
        raise DataIntegrityError(f"{path}: damaged compressed file: {what}", "copy the file again") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
