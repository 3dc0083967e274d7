"""Digests of the files of shards. A file is read again only if it changed since it was last read."""

import contextlib
import hashlib
from pathlib import Path

from specc.compiler.generated_folder import replace_file
from specc.runtime.data.errors import DataIntegrityError
from specc.runtime.data.shards.record import HINT, RECORD, ShardEntry


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_recorded(path: Path, entry: ShardEntry, cache: Path | None) -> None:
    """Raises DataIntegrityError if the file `path` is not the file of `entry`, by its SHA-256.

    The folder `cache` has a note of each file that was read. A file with the inode, the size and the times of its note
    is not read again. If `cache` is None, no notes are read or written.
    """
    status = path.stat()
    facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, entry.sha256)
    note = None if cache is None else cache / "digests" / hashlib.sha256(str(path.absolute()).encode()).hexdigest()
    with contextlib.suppress(OSError):
        if note is not None and note.read_bytes() == f"{facts}\n".encode():
            return
    if sha256_of(path) != entry.sha256:
        raise DataIntegrityError(f"{path}: not the file that {RECORD} describes: its SHA-256 differs", HINT)
    with contextlib.suppress(OSError):  # without a note, the file is read again at the next start
        if note is not None:
            replace_file(note, f"{facts}\n")
