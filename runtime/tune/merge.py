"""Writes one result into the lock on disk, which another search may have written meanwhile."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from specc.compiler.plan.lock import Lock, read_lock
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.tune.journal import folder


def merged(path: Path, change: Callable[[Lock], Lock]) -> Lock:
    """Writes what `change` makes of the lock that stands at `path` now, and returns it. Searches of one user wait for
    each other here.

    Raises SpecError where somebody has damaged the lock, RunFailure where it cannot be written.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
    with FileLock(folder() / f"{name}.lock", mode=0o600):
        lock = change(read_lock(path))
        write_atomically(path, [lock.text().encode()], lambda _: None)
    return lock
