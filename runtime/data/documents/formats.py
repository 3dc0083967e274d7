"""File formats of documents: text, jsonl and source code, plain or compressed."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from specc.runtime.data.errors import DataError, DataIntegrityError

Bounds = Literal["endoftext", "blank-line", "record", "file"]

SEPARATOR = b"<|endoftext|>"
KINDS: dict[str, Bounds] = {".txt": "endoftext", ".md": "file", ".py": "file", ".jsonl": "record"}
COMPRESSIONS = (".xz", ".gz")

# A .txt file of more than RUNNING_BYTES without any separator is running text. It is cut at line ends into documents of
# one to two BLOCK_BYTES, so that it can be divided into splits and memory is bounded. This is not done if the user
# states the boundaries between documents.
RUNNING_BYTES = 256 * 1024
BLOCK_BYTES = 16 * 1024
_LINE_BYTES = 1024 * 1024
# A whole document is in memory at once, and some tokenizers need thirty times its size for its tokens.
DOCUMENT_BYTES = 64 * 1024 * 1024
READ_ERRORS = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)
SUPPORTED = f"readable: {', '.join(KINDS)}, each also with {' or '.join(COMPRESSIONS)}; token shards end in .bin"


def kind_of(path: Path) -> str:
    """Returns the format of a file, such as `.txt` for `a.txt` and `a.txt.xz`; empty if it is not supported."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix if suffix in KINDS else ""


def read_documents(path: Path, bounds: Bounds | None = None) -> Iterator[bytes]:
    """Yields the documents of a file, including empty documents.

    `bounds` determines the boundaries between documents; None selects the default of the file format. Documents of a
    .jsonl file are always its records. A large .txt file may be read twice, to find out whether it has a separator.

    Raises DataError if the file cannot be read, a line of a .jsonl file is invalid, or a document has more than
    DOCUMENT_BYTES. Raises DataIntegrityError if a compressed file is damaged.
    """
    kind = kind_of(path)
    where = KINDS[kind] if bounds is None or kind == ".jsonl" else bounds
    try:
        with open_file(path) as file:
            if where == "record":
                yield from _json_lines(file, path)
            elif where == "file":
                yield _bounded(file.read(DOCUMENT_BYTES + 1), path)
            else:
                ends = _is_separator if where == "endoftext" else _is_blank
                yield from _separated(file, path, ends, may_run=bounds is None)
    except READ_ERRORS as error:
        what = str(error) or type(error).__name__
        raise DataIntegrityError(f"{path}: damaged compressed file: {what}", "copy the file again") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def open_file(path: Path) -> io.BufferedIOBase:
    """Opens a file that may be compressed. Reading raises OSError, or one of READ_ERRORS if the file is damaged."""
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".gz":
        return gzip.open(path)
    return open(path, "rb")


def _is_separator(line: bytes) -> bool:
    return line.rstrip(b"\r\n") == SEPARATOR


def _is_blank(line: bytes) -> bool:
    return len(line) < _LINE_BYTES and not line.strip()


def _bounded(document: bytes, where: str | Path) -> bytes:
    """Returns the document. Raises DataError if it has more than DOCUMENT_BYTES."""
    if len(document) > DOCUMENT_BYTES:
        hint = "split it, or change the boundaries between documents with `specc data pack --bounds`"
        raise DataError(f"{where}: a document has more than {DOCUMENT_BYTES:,} bytes", hint)
    return document


def _lines(file: io.BufferedIOBase) -> Iterator[tuple[bytes, bool]]:
    """Yields lines with their line ends, and whether the yielded bytes begin a line. Long lines come in parts."""
    begins = True
    while line := file.readline(_LINE_BYTES):
        yield line, begins
        begins = line.endswith(b"\n")


def _separated(file: io.BufferedIOBase, path: Path, ends: Callable[[bytes], bool], may_run: bool) -> Iterator[bytes]:
    """Yields the documents between separator lines.

    Documents include their last line end, but not the separators. If `may_run`, a large file without separators is cut
    into blocks.
    """
    pending: list[bytes] = []
    size = 0
    running = False
    for line, begins in _lines(file):
        if begins and ends(line):
            may_run = False
            yield b"".join(pending)
            pending, size = [], 0
        else:
            pending.append(line)
            size += len(line)
            if size > DOCUMENT_BYTES:
                _bounded(b"".join(pending), path)
            if may_run and size >= RUNNING_BYTES:  # running text, or a long first document
                may_run = False
                with open_file(path) as again:
                    running = not any(begins and ends(line) for line, begins in _lines(again))
            if running and size > 2 * BLOCK_BYTES:
                *blocks, rest = _blocks(b"".join(pending))
                yield from blocks
                pending, size = [rest], len(rest)
    yield b"".join(pending)


def _blocks(text: bytes) -> Iterator[bytes]:
    """Cuts `text` into blocks at line ends, or between characters if lines are too long.

    The last block has at most 2 * BLOCK_BYTES.
    """
    start = 0
    while len(text) - start > 2 * BLOCK_BYTES:
        cut = text.find(b"\n", start + BLOCK_BYTES, start + 2 * BLOCK_BYTES) + 1
        if not cut:
            cut = start + 2 * BLOCK_BYTES
            while text[cut] & 0xC0 == 0x80 and cut > start + 2 * BLOCK_BYTES - 3:  # inside a UTF-8 character
                cut -= 1
        yield text[start:cut]
        start = cut
    yield text[start:]


def _json_lines(file: io.BufferedIOBase, path: Path) -> Iterator[bytes]:
    lines = iter(lambda: file.readline(DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        _bounded(line, where)
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


_LINE_HINT = 'each line must be one JSON object such as {"text": "a document"}; correct the line or remove it'
