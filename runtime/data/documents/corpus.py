"""Finds and reads the documents of a text source: a file, a folder of files, or the source code of the Python standard
library.
"""

import hashlib
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specc.runtime.data.documents.formats import KINDS, SUPPORTED, Bounds, kind_of, read_documents
from specc.runtime.data.errors import DataError
from specc.runtime.data.missing_paths import missing_source
from specc.runtime.data.split import Split

_SPLIT_NAME = re.compile(r"(train|val)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)
# The tests contain invalid encodings on purpose. The other folders differ between installations of one Python version.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of one split of a source.

    Attributes:
        source: the source as the user stated it.
        split: "train" or "val".
        files: pairs (label, path), in order. A label is a path relative to the source.
        in_val: a function that returns whether a document, given as bytes, is in the val split. None if all documents
            of a file belong to the same split.
        bounds: the rule that divides a file into documents. None selects the default of each file format.
        left_out: the labels of the files that belong to no split. For example, if there are files named train and val,
            all other files are left out.
    """

    source: str
    split: Split
    files: tuple[tuple[str, Path], ...]
    in_val: Callable[[bytes], bool] | None = None
    bounds: Bounds | None = None
    left_out: tuple[str, ...] = ()

    def require_files(self) -> None:
        if not self.files:
            split = self.split
            hint = f"add a {split}.txt or {split}.jsonl"
            raise DataError(f"{self.source} has no files for the {split} split", hint)

    def documents(self) -> Iterator[bytes]:
        """Yields the non-empty documents of the split, in order.

        Raises DataError if a file cannot be read, or if the split has no documents. Raises DataIntegrityError if a
        compressed file is damaged.
        """
        empty = True
        for _, path in self.files:
            for document in read_documents(path, self.bounds):
                if document and (self.in_val is None or self.in_val(document) == (self.split == "val")):
                    empty = False
                    yield document
        if empty:
            more = "val is a fraction of the documents, by hash: add more documents, or separate files for each split"
            hint = "add a document that is not empty" if self.in_val is None else more
            raise DataError(f"{self.source}: the {self.split} split has no documents", hint)

    def listing(self) -> list[list[str | int]]:
        """Returns the label, path, size and modification time (in ns) of each file.

        If two listings are equal, the documents are equal. Raises DataError if a file cannot be accessed.
        """
        rows: list[list[str | int]] = []
        for label, path in self.files:
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from None
            rows.append([label, str(path.absolute()), status.st_size, status.st_mtime_ns])
        return rows


def documents(source: str | Path, split: Split) -> Iterator[bytes]:
    """Yields the documents of one split of a source, as bytes.

    Sources:
        `stdlib`: the standard library of the running Python without its tests. Each .py file is a document. The SHA-256
            of the path within the library selects about 1 file in 10 for val.
        a file: .txt (documents separated by a line `<|endoftext|>`), .jsonl (one object per line, with the document in
            its string "text"), .md or .py (one document). These files may be compressed as .xz, .gz or .zst. A .parquet
            or .arrow file has one document per row, in the column "text".
        a folder: all files of the formats above in the folder and its subfolders, in the order of their relative paths.
            In a folder that Hugging Face `datasets` saved, only the files that state.json lists are read.

    A file is in val if its name, or the name of its top-level folder, starts with the word val, valid or validation. If
    a source has such files, train consists of the files whose names start with train, or of all other files if no name
    starts with train. If a source has no such files, the SHA-256 of a document selects about 1 document in 10 for val.

    Raises:
        DataError: if the source does not exist, a line is invalid, or the split has no documents. For an invalid line,
            the message names the file and the line.
        DataIntegrityError: if a compressed file is damaged.
    """
    return find_corpus(source, split).documents()


def find_corpus(source: str | Path, split: Split) -> Corpus:
    """Returns the files of a split that `documents` reads. Raises DataError if the split has no files."""
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
    """Divides the files of several sources into the splits train and val. A split may have no files.

    Args:
        sources: paths of files or folders, or `stdlib`.
        validation: the sources of the val split. If empty, a part of `sources` is the val split.
        share: the fraction of documents in val. The SHA-256 of a document decides whether the document is in val. None
            applies the rules of `documents`.
        bounds: the rule that divides a file into documents. None selects the default of each file format.

    Returns:
        The files of each split.

    Raises:
        DataError: if a source cannot be read, a file is in both splits, or `bounds` is given although all files consist
            of records (.jsonl, .parquet, .arrow).
    """
    name, files = ", ".join(map(str, sources)), _files(sources)
    val, train = _files(validation), files
    kinds = {kind_of(path) for _, path in files + val}
    if bounds not in (None, "record") and all(KINDS[kind] == "record" for kind in kinds):
        suffixes = " and ".join(sorted(kinds))
        message = f"{name}: documents of {suffixes} files are records and cannot end at `{bounds}`"
        raise DataError(message, "leave --bounds out")
    in_val: Callable[[bytes], bool] | None = None
    if validation:
        both = {path.resolve() for _, path in train} & {path.resolve() for _, path in val}
        if both:
            raise DataError(f"{min(both)} is in both splits", "use other files for validation")
    elif share is not None:
        val, in_val = files, partial(in_share, share)
    elif list(sources) == ["stdlib"]:
        val = [file for file in files if is_val(file[0].encode())]
        train = [file for file in files if not is_val(file[0].encode())]
    elif val := [file for file in files if _named(file[0]) == "val"]:
        train = [file for file in files if _named(file[0]) == "train"] or [file for file in files if file not in val]
    else:
        val, in_val = files, is_val
    read = {*train, *val}
    left = () if validation else tuple(file[0] for file in files if file not in read)
    return {
        "train": Corpus(name, "train", tuple(train), in_val, bounds, left),
        "val": Corpus(", ".join(map(str, validation)) or name, "val", tuple(val), in_val, bounds),
    }


def _files(sources: Sequence[str | Path]) -> list[tuple[str, Path]]:
    all_files: list[tuple[str, Path]] = []
    for source in sources:
        path = Path(source).expanduser()
        if source == "stdlib":
            files = _stdlib_files()
        elif path.is_dir():
            files = _folder_files(path)
            if not files:
                raise DataError(f"{source}: no files to read in this folder", SUPPORTED)
        elif path.exists():
            files = [(path.name, path)]
            if not kind_of(path):
                raise DataError(f"{source}: cannot read documents from a {path.suffix or 'suffixless'} file", SUPPORTED)
        else:
            raise missing_source(path)
        all_files += files
    return all_files


def is_val(key: bytes) -> bool:
    """Returns whether the SHA-256 of `key` selects the val split. About 1 key in 10 is selected."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 10 == 0


def in_share(share: float, key: bytes) -> bool:
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < share * 2**64


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, _NOT_STDLIB) if file[1].suffix == ".py"]
    files = [file for file in files if not file[1].name.startswith("_sysconfigdata") and _is_utf8(file[1])]
    if not files:
        message = f"Python {platform.python_version()} has no source files of its library in {root}"
        raise DataError(message, "use other data")
    return files


def _folder_files(root: Path) -> list[tuple[str, Path]]:
    files = [file for file in _walk(root, set()) if kind_of(file[1])]
    listed = {folder: _dataset_files(folder) for folder in {path.parent for _, path in files}}
    return [(label, path) for label, path in files if (names := listed[path.parent]) is None or path.name in names]


def _dataset_files(folder: Path) -> set[str] | None:
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return {str(entry["filename"]) for entry in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _walk(root: Path, skip: set[str]) -> list[tuple[str, Path]]:
    files: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = [Path(folder) / name for name in names if not name.startswith(".")]
        files += [(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _named(label: str) -> str | None:
    parts = label.split("/")
    match = _SPLIT_NAME.match(parts[-1]) or (_SPLIT_NAME.match(parts[0]) if len(parts) > 1 else None)
    return match[1].lower() if match else None
