"""Writes a file whole or not at all: temporary file beside it, fsync, check, rename, fsync of the folder."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from specc.runtime.errors import cannot_write


def write_atomically(path: Path, parts: Iterable[bytes], check: Callable[[Path], None]) -> None:
    """Writes `parts` to `path`, replacing what is there.

    `check` gets the finished temporary file and raises to refuse it; then, as after any failure, `path` is as
    before and nothing is left beside it. Temporary files of writers that were killed are removed first.
    Raises EnvironmentFailure when the disk is full, RunFailure when the operating system refuses for another reason.
    """
    try:
        _sweep(path)
        with _temporary(path) as (temporary, descriptor):
            for part in parts:
                _write_all(descriptor, part)
            os.fsync(descriptor)
            check(temporary)
            temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise cannot_write(path, error) from error


def _write_all(descriptor: int, part: bytes) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside `path`, under a lock that dies with this process, which tells it from a left-over."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # another writer's sweep took it between its creation and its lock
    try:
        yield temporary, descriptor
    finally:
        # After the rename there is nothing left to unlink.
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


def _sweep(path: Path) -> None:
    """Removes the temporary files for `path` that no living writer holds."""
    prefix = f".{path.name}."
    for entry in sorted(os.listdir(path.parent)):
        if not (entry.startswith(prefix) and entry.endswith(".tmp") and len(entry) == len(prefix) + 12):
            continue
        left = path.with_name(entry)
        try:
            descriptor = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, or not a file of ours
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
