"""Documents from text: the standard library's own source, files, or folders of files, as streams of bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards import Split

Bounds = Literal["endoftext", "blank-line", "record", "file"]

SEPARATOR = b"<|endoftext|>"
KINDS: dict[str, Bounds] = {".txt": "endoftext", ".md": "file", ".py": "file", ".jsonl": "record"}
COMPRESSIONS = (".xz", ".gz")

# A .txt file without a separator in its first RUNNING_BYTES is running text, cut at line ends into documents
# of one to two BLOCK_BYTES: it can then be split, and memory stays bounded.
RUNNING_BYTES = 256 * 1024
BLOCK_BYTES = 16 * 1024
_LINE_BYTES = 1024 * 1024

_SPLIT_NAME = re.compile(r"(train|val)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)
# Tests hold broken and odd encodings on purpose; the others differ between installations of one version.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"}
READ_ERRORS = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of one split of a source.

    Attributes:
        source: as the user gave it.
        split: "train" or "val".
        files: (label, path), in order; the label is the path relative to the source.
        in_val: whether a document with these bytes is in val; None where the files decide it.
        bounds: where documents end; None for what is usual for the kind of each file.
    """

    source: str
    split: Split
    files: tuple[tuple[str, Path], ...]
    in_val: Callable[[bytes], bool] | None = None
    bounds: Bounds | None = None

    def require_files(self) -> None:
        """Raises DataError where the split has no files."""
        if not self.files:
            split = self.split
            hint = f"put a {split}.txt or {split}.jsonl beside them"
            raise DataError(f"{self.source}: no files for the {split} split", hint)

    def documents(self) -> Iterator[bytes]:
        """The split's documents in order; empty ones are left out. Raises DataError (see `documents`)."""
        empty = True
        for _, path in self.files:
            for document in _read_documents(path, self.bounds):
                if document and (self.in_val is None or self.in_val(document) == (self.split == "val")):
                    empty = False
                    yield document
        if empty:
            raise DataError(
                f"{self.source}: the {self.split} split has no documents",
                "one document in ten, by hash, is val: give more, or a folder with train.* and val.* files",
            )

    def listing(self) -> list[list[str | int]]:
        """What decides the documents, without reading them: label, path, size and time of each file."""
        rows: list[list[str | int]] = []
        for label, path in self.files:
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from None
            rows.append([label, str(path.absolute()), status.st_size, status.st_mtime_ns])
        return rows


def documents(source: str | Path, split: Split) -> Iterator[bytes]:
    """The documents of one split of a source, one at a time, as the bytes that stand in the source.

    Sources:
        `stdlib`: the running Python's standard library without its tests; one .py file is one document, and
            the SHA-256 of its path within the library puts about one in ten in val.
        a file: .txt (documents separated by a line `<|endoftext|>`), .jsonl (an object a line, the document
            in its string "text"), .md or .py (one document); each also as .xz or .gz.
        a folder of such files, searched to the bottom, in the order of their relative paths.
    If a file, or the top folder it is in, has a name that starts with the word val (valid, validation), those
    files are the val split, and those named train (if none is, all others) the train split. Otherwise the
    SHA-256 of each document's bytes puts one in ten in val.

    Raises:
        DataError: no such source, a bad line (with file and line), or no document in the split.
        DataIntegrityError: a compressed file is damaged.
    """
    return find_corpus(source, split).documents()


def find_corpus(source: str | Path, split: Split) -> Corpus:
    """The files that `documents` would read. Raises DataError if there are none."""
    if split not in ("train", "val"):
        raise DataError(f"unknown split {split!r}", "use train or val")
    corpus = split_corpus([source])[split]
    corpus.require_files()
    return corpus


def split_corpus(
    sources: Sequence[str | Path],
    validation: Sequence[str | Path] = (),
    share: float | None = None,
    bounds: Bounds | None = None,
) -> dict[Split, Corpus]:
    """Both splits of sources taken together. With `validation`, these sources are val; with `share`, that share of all
    documents, by SHA-256; with neither it is as `documents` says. Raises DataError for what cannot be read; a split
    may have no files."""
    name, files = ", ".join(map(str, sources)), _files(sources, bounds)
    val, train = _files(validation, bounds), files
    in_val: Callable[[bytes], bool] | None = None
    if validation:
        both = {path.resolve() for _, path in train} & {path.resolve() for _, path in val}
        if both:
            raise DataError(f"{min(both)}: both to train on and to validate on", "give other files for validation")
    elif share is not None:
        val, in_val = files, partial(in_share, share)
    elif list(sources) == ["stdlib"]:
        val = [file for file in files if is_val(file[0].encode())]
        train = [file for file in files if file not in val]
    elif val := [file for file in files if _named(file[0]) == "val"]:
        train = [file for file in files if _named(file[0]) == "train"] or [file for file in files if file not in val]
    else:
        val, in_val = files, is_val
    return {
        "train": Corpus(name, "train", tuple(train), in_val, bounds),
        "val": Corpus(name, "val", tuple(val), in_val, bounds),
    }


def _files(sources: Sequence[str | Path], bounds: Bounds | None) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for source in sources:
        path = Path(source).expanduser()
        if source == "stdlib":
            files = _stdlib_files()
        elif path.is_dir():
            files = _folder_files(path)
            if not files:
                raise DataError(f"{source}: no files to read in this folder", _SUPPORTED)
        elif path.exists():
            files = [(path.name, path)]
            if not _kind(path):
                raise DataError(
                    f"{source}: cannot read documents from a {path.suffix or 'suffixless'} file", _SUPPORTED
                )
        else:
            raise DataError(f"{source}: no such file or folder", "`stdlib` is a source that needs no files")
        found += files
    if bounds not in (None, "record") and (lines := [path for _, path in found if _kind(path) == ".jsonl"]):
        raise DataError(f"{lines[0]}: its documents are the records, and cannot end at `{bounds}`", "leave it out")
    return found


_SUPPORTED = f"readable: {', '.join(KINDS)}, each also with {' or '.join(COMPRESSIONS)}; token shards end in .bin"


def is_val(key: bytes) -> bool:
    """Whether a document (or its path) with these bytes is in the val split: one in ten, by SHA-256."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 10 == 0


def in_share(share: float, key: bytes) -> bool:
    """Whether a document with these bytes is in the val split, where that is a share of all."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < share * 2**64


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, _NOT_STDLIB) if file[1].suffix == ".py"]
    files = [file for file in files if not file[1].name.startswith("_sysconfigdata") and _is_utf8(file[1])]
    if not files:
        raise DataError(f"Python {platform.python_version()} has no source of its library in {root}", "use other data")
    return files


def _folder_files(root: Path) -> list[tuple[str, Path]]:
    return [file for file in _walk(root, set()) if _kind(file[1])]


def _walk(root: Path, skip: set[str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = [Path(folder) / name for name in names if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(found)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _named(label: str) -> str | None:
    """The split that a file's name or its top folder's name states."""
    parts = label.split("/")
    match = _SPLIT_NAME.match(parts[-1]) or (_SPLIT_NAME.match(parts[0]) if len(parts) > 1 else None)
    return match[1].lower() if match else None


def _kind(path: Path) -> str:
    """`.txt` for `a.txt` and `a.txt.xz`; empty for what cannot be read."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix if suffix in KINDS else ""


def _read_documents(path: Path, bounds: Bounds | None) -> Iterator[bytes]:
    bounds = bounds or KINDS[_kind(path)]
    try:
        with open_file(path) as file:
            if bounds == "record":
                yield from _json_lines(file, path)
            elif bounds == "file":
                yield file.read()
            else:
                yield from _separated(file, _is_separator if bounds == "endoftext" else _is_blank)
    except READ_ERRORS as error:
        what = str(error) or type(error).__name__
        raise DataIntegrityError(f"{path}: damaged compressed file: {what}", "copy the file again") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def open_file(path: Path) -> io.BufferedIOBase:
    """The bytes of a file, which may be compressed. Reading it raises OSError, or READ_ERRORS where it is damaged."""
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".gz":
        return gzip.open(path)
    return open(path, "rb")


def _is_separator(line: bytes) -> bool:
    return line.rstrip(b"\r\n") == SEPARATOR


def _is_blank(line: bytes) -> bool:
    return len(line) < _LINE_BYTES and not line.strip()


def _separated(file: io.BufferedIOBase, ends: Callable[[bytes], bool]) -> Iterator[bytes]:
    """Documents between separator lines. A document keeps its last line end; no separator is in one."""
    held: list[bytes] = []
    size = 0
    separated = running = False
    line_start = True
    while line := file.readline(_LINE_BYTES):
        if line_start and ends(line):
            separated = True
            yield b"".join(held)
            held, size = [], 0
        else:
            held.append(line)
            size += len(line)
            running = running or (not separated and size >= RUNNING_BYTES)
            if running and size > 2 * BLOCK_BYTES:
                *blocks, rest = _blocks(b"".join(held))
                yield from blocks
                held, size = [rest], len(rest)
        line_start = line.endswith(b"\n")
    yield b"".join(held)


def _blocks(text: bytes) -> Iterator[bytes]:
    """Cut `text` at line ends, or else between characters, so that at most 2 * BLOCK_BYTES are left over."""
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
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
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
                found = f"a JSON {type(record).__name__}"
            else:
                found = f'"text" is a {type(text).__name__}' if "text" in record else 'an object without "text"'
            raise DataError(f'{where}: expected an object with a string "text", found {found}', _LINE_HINT)
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f'{where}: "text" has half a surrogate pair, which is no character', _LINE_HINT) from None


_LINE_HINT = 'each line must be one JSON object such as {"text": "a document"}; correct the line or remove it'
