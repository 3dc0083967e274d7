"""Merges one result into the lock on disk, which another search may have changed since it was read."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from specc.compiler.plan.lock import Lock, read_lock
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.tune.journal import folder


def merged(path: Path, change: Callable[[Lock], Lock]) -> Lock:
    """Applies `change` to the current lock at `path`, writes the result and returns it. Concurrent searches of one user
    are serialized by a file lock.

    Raises SpecError if the lock is damaged, and EnvironmentFailure if it cannot be written.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
    with FileLock(folder() / f"{name}.lock", mode=0o600):
        lock = change(read_lock(path))
        write_atomically(path, [lock.text().encode()])
    return lock
