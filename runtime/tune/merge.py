"""Merges one result into a lock file that other searches may change at the same time."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from specc.compiler.plan.lock import Lock, read_lock
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.tune.journal import folder


def merged(path: Path, change: Callable[[Lock], Lock]) -> Lock:
    """Reads the lock file at `path`, applies `change` to its content, and writes and returns the new content.

    Concurrent searches of one user wait for each other. Raises SpecError if the lock file is damaged. Raises
    EnvironmentFailure if the lock file cannot be written.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
    with FileLock(folder() / f"{name}.lock", mode=0o600):
        lock = change(read_lock(path))
        write_atomically(path, [lock.text().encode()])
    return lock
