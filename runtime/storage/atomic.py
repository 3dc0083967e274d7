"""Writes a file completely or not at all.

The content is written to a temporary file in the same folder, synced and checked. The file is then renamed, and the
folder is synced.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from specc.runtime.errors import ExportError, cannot_write


def require_replaceable(path: Path, force: bool = True) -> None:
    """Raises EnvironmentFailure if `path` exists and is not a regular file, such as a device or a named pipe.

    Raises ExportError if `path` exists and `force` is False.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise cannot_write(path, OSError("it exists, and is not a regular file"))
    if not force:
        raise ExportError(f"{path} exists", "name another path with --out, or replace it with --force")


def write_atomically(path: Path, parts: Iterable[bytes], check: Callable[[Path], None] = lambda _: None) -> None:
    """Writes a file, or replaces an existing file.

    After an error, no temporary file remains, and `path` is unchanged. There is one exception: if syncing the folder
    fails, `path` has the new content, but a power failure may undo the write.

    Args:
        path: the file to write.
        parts: the content, in parts.
        check: a function that is called before the rename, with the path of the finished temporary file. The function
            may raise an exception to reject the file.

    Raises:
        EnvironmentFailure: if the file cannot be written, or `path` is not a regular file.
    """
    try:
        require_replaceable(path)
        _sweep(path)
        with _temporary(path) as (temporary, descriptor):
            for part in parts:
                write_all(descriptor, part)
            os.fsync(descriptor)
            check(temporary)
            temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_all(descriptor: int, part: bytes) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]


def create_folder(folder: Path) -> None:
    """Creates a folder and its parents, and syncs their directory entries to the disk.

    Without the sync, a power failure could remove the folder together with the files in it.
    """
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in new:
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the directory entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, int]]:
    """A context manager that creates a temporary file next to `path`, and locks it. Yields its path and descriptor.

    The operating system releases the lock when this process ends. `_sweep` can therefore recognize files of processes
    that have ended.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # another writer removed the file before this process locked it
    try:
        yield temporary, descriptor
    finally:
        # After the rename, this path no longer exists
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


def _sweep(path: Path) -> None:
    prefix = f".{path.name}."
    for entry in sorted(os.listdir(path.parent)):
        if not (entry.startswith(prefix) and entry.endswith(".tmp") and len(entry) == len(prefix) + 12):
            continue
        left = path.with_name(entry)
        try:
            descriptor = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # another process has removed the file, or the file cannot be opened
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
