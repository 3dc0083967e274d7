"""Reads .jsonl files, which have one JSON object per line. A document is the string "text" of an object."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specc.runtime.data.documents import files
from specc.runtime.data.documents.files import bounded
from specc.runtime.data.errors import DataError

_LINE_HINT = 'each line must be one JSON object such as {"text": "a document"}; correct the line or remove it'


def json_records(file: io.BufferedIOBase, path: Path, hint: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) for each non-blank line of a file. The place is `path:line`.

    Raises DataError with `hint` if a line is not a JSON object in UTF-8, or has more than DOCUMENT_BYTES.
    """
    lines = iter(lambda: file.readline(files.DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        bounded(line, where)
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not valid UTF-8 at byte {error.start} of the line", hint) from None
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise DataError(f"{where}: not JSON: {what}", hint) from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, not a JSON {type(record).__name__}", hint)
        yield where, record


def json_lines(file: io.BufferedIOBase, path: Path) -> Iterator[bytes]:
    for where, record in json_records(file, path, _LINE_HINT):
        text = record.get("text")
        if not isinstance(text, str):
            actual = f'"text" of type {type(text).__name__}' if "text" in record else 'an object without "text"'
            raise DataError(f'{where}: expected an object with a string "text", not {actual}', _LINE_HINT)
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:
            message = f'{where}: "text" has half a surrogate pair, which is not a character'
            raise DataError(message, _LINE_HINT) from None
