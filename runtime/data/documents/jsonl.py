"""Documents of a .jsonl file: one JSON object per line, with the document in its string "text"."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

from specc.runtime.data.documents import files
from specc.runtime.data.documents.files import bounded
from specc.runtime.data.errors import DataError

_LINE_HINT = 'each line must be one JSON object such as {"text": "a document"}; correct the line or remove it'


def json_lines(file: io.BufferedIOBase, path: Path) -> Iterator[bytes]:
    lines = iter(lambda: file.readline(files.DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        bounded(line, where)
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not valid UTF-8 at byte {error.start} of the line", _LINE_HINT) from None
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise DataError(f"{where}: not JSON: {what}", _LINE_HINT) from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            if not isinstance(record, dict):
                actual = f"a JSON {type(record).__name__}"
            else:
                actual = f'"text" of type {type(text).__name__}' if "text" in record else 'an object without "text"'
            raise DataError(f'{where}: expected an object with a string "text", found {actual}', _LINE_HINT)
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(
                f'{where}: "text" has half a surrogate pair, which is not a character', _LINE_HINT
            ) from None
