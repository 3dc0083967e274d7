"""Directories that are written completely or not at all.

COMMIT is a JSON file with the size and SHA-256 of every other file. A directory without a valid COMMIT is not valid. A
directory is written under a temporary name, synced, and then renamed. After a kill or a power failure, the final name
therefore never refers to a partial directory.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from specc.compiler.spec.messages.values import TYPES
from specc.compiler.strict import StrictModel
from specc.runtime.errors import IntegrityError
from specc.runtime.storage.atomic import sync_folder, write_all

COMMIT = "COMMIT"
PROBLEMS = {"json_invalid": "is not JSON", "missing": "is missing", "extra_forbidden": "is not a valid key"}
HINT = "use an older directory of this kind, or create it again"


class Member(StrictModel):
    size: Annotated[int, Field(ge=0)]
    sha256: str


class Commit(StrictModel):
    format: Literal[1]
    name: str
    members: dict[str, Member]


@dataclass(frozen=True, slots=True)
class Committed:
    """A directory whose COMMIT file was read. `read` compares each file with the size and digest in COMMIT."""

    path: Path
    members: dict[str, Member]

    @classmethod
    def open(cls, path: Path) -> "Committed":
        """Reads the COMMIT file of a directory.

        Raises IntegrityError if the directory or its COMMIT file is missing, or if the COMMIT file was written for
        another directory.
        """
        try:
            commit = Commit.model_validate_json((path / COMMIT).read_bytes())
        except FileNotFoundError:
            what = "has no COMMIT file: it was never completed" if path.is_dir() else "does not exist"
            raise IntegrityError(f"{path} {what}", HINT) from None
        except OSError as error:
            raise IntegrityError(f"{path / COMMIT}: {error.strerror}", HINT) from None
        except ValidationError as error:
            raise IntegrityError(f"{path / COMMIT}: {in_words(error)}", HINT) from None
        if commit.name != path.name or any(name != os.path.basename(name) for name in commit.members):
            raise IntegrityError(f"{path / COMMIT}: is the COMMIT of another directory, not of {path.name}", HINT)
        return cls(path, commit.members)

    def read(self, name: str) -> bytes:
        """Returns the content of one file. Raises IntegrityError if the file is missing, or does not match COMMIT."""
        member, path = self.members.get(name), self.path / name
        if member is None:
            raise IntegrityError(f"{self.path}: has no {name}", HINT)
        try:
            with open(path, "rb") as file:  # not mapped into memory, because truncating a mapped file kills the process
                size = os.fstat(file.fileno()).st_size
                data = file.read(member.size) if size == member.size else b""
        except OSError as error:
            raise IntegrityError(f"{path}: {error.strerror}", HINT) from None
        if size != member.size:
            raise IntegrityError(f"{path}: has {size:,} bytes, not {member.size:,}", HINT)
        if hashlib.sha256(data).hexdigest() != member.sha256:
            raise IntegrityError(f"{path}: its SHA-256 differs from the SHA-256 in COMMIT", HINT)
        return data

    def in_full_size(self) -> bool:
        """Returns whether all files exist and have the sizes in COMMIT. The method does not read the files."""
        try:
            sizes = {name: (self.path / name).stat().st_size for name in self.members}
        except OSError:
            return False
        return all(sizes[name] == member.size for name, member in self.members.items())


def write(path: Path, files: Iterable[tuple[str, Iterable[bytes]]]) -> None:
    """Creates the directory `path`, which must not exist, with files and their COMMIT file.

    `files` contains pairs: the name of a file, and the parts of its content. Raises OSError if an operation fails.
    After an error, no part of the directory remains.
    """
    temporary = _aside(path)
    try:
        os.makedirs(temporary)
        members = {name: _write_file(temporary / name, parts) for name, parts in files}
        commit = Commit(format=1, name=path.name, members=members)
        _write_file(temporary / COMMIT, [commit.model_dump_json(indent=1).encode()])
        sync_folder(temporary)
        os.rename(temporary, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename, this path does not exist


def discard(path: Path) -> None:
    """Removes a directory. The directory is first renamed, so that its name never refers to a partial directory."""
    aside = _aside(path)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def replace(path: Path, new: Path) -> None:
    """Replaces the directory `path` by the directory `new`. Both must have the same name and be on the same disk.

    The function first renames the previous directory to `before` in the parent folder of `new`. It then renames `new`
    to `path`. The caller removes the previous directory later. If the process is killed between the two renames, `path`
    does not exist, and `settle` can finish the replacement. Raises OSError if an operation fails.
    """
    if path.exists():
        os.rename(path, new.with_name("before"))
    settle(path, new)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "the directory was removed during the replacement", str(path))


def settle(path: Path, new: Path) -> None:
    """Finishes an interrupted `replace`. If `path` does not exist and `new` is complete, renames `new` to `path`.

    Any process may call this function at any time. Raises OSError if an operation fails.
    """
    if path.exists() or not new.is_dir():
        return
    with suppress(IntegrityError, FileNotFoundError):  # `new` is incomplete, or another process renamed it first
        Committed.open(new)
        os.rename(new, path)
        sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Removes the temporary directories that interrupted writers left in `folder`. No other process may write to
    `folder`.
    """
    for stray in sorted(folder.glob(".*.tmp")):
        shutil.rmtree(stray, ignore_errors=True)


def in_words(error: ValidationError) -> str:
    """Returns the first problem of a validation as text, such as `members.state.json.size is missing`."""
    first = error.errors(include_url=False)[0]
    kind, place = first["type"], ".".join(map(str, first["loc"])) or "the text"
    wanted = first["ctx"]["expected"] if kind == "literal_error" else TYPES.get(kind)
    return f"{place} must be {wanted}" if wanted else f"{place} {PROBLEMS.get(kind, 'is not valid')}"


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _write_file(path: Path, parts: Iterable[bytes]) -> Member:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    size, digest = 0, hashlib.sha256()
    try:
        for part in parts:
            write_all(descriptor, part)
            size += len(part)
            digest.update(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Member(size=size, sha256=digest.hexdigest())
