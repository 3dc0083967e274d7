"""The cache of generated and compiled code: private folders of files that are loaded as code.

The default cache folder of Torch has a predictable name in /tmp. Another user could create this folder first, and place
code in it. specc therefore uses private folders. The name of a cache entry is a digest of the source code. Runs can
therefore share entries, and never read outdated code.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from specc.runtime.storage.atomic import write_atomically
from specc.runtime.support.native import cache_folder, cache_root, private_folder

# The environment variable of each compiler, and the name of the compiler's folder in the cache of specc.
CACHES: Mapping[str, str] = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
GENERATED = "specc_generated_"  # the prefix of the names of packages of generated code; a digest of the code follows it
PROGRAMS = "programs"  # the folder of stored programs
FOLDERS = ("generated", "native", PROGRAMS, *CACHES.values())
LIMIT = 20.0  # in GB, if SPECC_CACHE_GB is not set
IN_USE = 24 * 3600  # in seconds; entries that were used within this time are not removed


def use_private_caches() -> None:
    """Makes this process and its child processes store compiled code in private folders.

    The function sets the environment variables in `CACHES`, except the variables that the user has set. Raises
    IntegrityError if a cache folder is a link, belongs to another user, or is writable by other users.
    """
    shared = f"{tempfile.gettempdir()}/torchinductor_"  # when imported, Inductor sets its variable to this folder
    for variable, name in CACHES.items():
        chosen = os.environ.get(variable)
        chosen = None if chosen is not None and chosen.startswith(shared) else chosen
        os.environ[variable] = str(private_folder(Path(chosen)) if chosen else cache_folder(name))

    import torch._functorch.config

    # Generated code has autograd functions. Torch may cache their graphs, because the cache key covers both passes.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def code_files(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.py"), *directory.glob("*.cu")])


def content_digest(directory: Path) -> str:
    content = hashlib.sha256()
    for path in code_files(directory):
        data = path.read_bytes()
        content.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return content.hexdigest()


def cached_code(directory: Path) -> Path:
    """Copies the code of a generated folder into the cache, and returns the folder of the copy.

    The copy outlives the run, so that later runs reuse its compiled libraries. Raises IntegrityError if the cache
    folder is a link, belongs to another user, or is writable by other users.
    """
    copy = private_folder(cache_folder("generated") / content_digest(directory)[:32])
    with FileLock(copy.with_suffix(".lock"), mode=0o600):
        for path in code_files(directory):
            data, target = path.read_bytes(), copy / path.name
            if target.is_symlink() or not target.is_file():
                target.unlink(missing_ok=True)
            if not target.exists() or target.read_bytes() != data:
                write_atomically(target, [data])
    return copy


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the cache, which is the smallest unit that `trim` removes.

    Attributes:
        path: the file or folder of the entry.
        size: the size in bytes.
        used: the time of the last use, in seconds since 1970.
    """

    path: Path
    size: int
    used: float


def entries() -> Iterator[Entry]:
    """Yields the entries of the cache, except entries in folders that the user has set by environment variables."""
    for name in FOLDERS:
        folder = cache_root() / name
        # The name of a folder of Inductor is two letters of a key. The files in the folder are independent of each
        # other.
        for path in filter(Path.is_file, folder.rglob("*")) if name == "inductor" else folder.glob("*"):
            try:
                facts = [part.lstat() for part in (path, *path.rglob("*")) if part.is_file()]
            except FileNotFoundError:  # another process has removed the entry in the meantime
                continue
            used = max((max(fact.st_atime, fact.st_mtime) for fact in facts), default=path.lstat().st_mtime)
            yield Entry(path, sum(fact.st_size for fact in facts), used)


def size_limit() -> float:
    """Returns the maximum size of the cache in bytes.

    The environment variable SPECC_CACHE_GB states the size in gigabytes. The default is `LIMIT`.
    """
    try:
        return float(os.environ.get("SPECC_CACHE_GB") or LIMIT) * 1e9
    except ValueError:
        return LIMIT * 1e9


def trim() -> None:
    """Removes the least recently used entries until the size of the cache is at most `size_limit()`.

    Entries that were used within the last day are not removed, because a run may still read them.
    """
    oldest_first = sorted(entries(), key=lambda entry: entry.used)
    excess = sum(entry.size for entry in oldest_first) - size_limit()
    for entry in oldest_first:
        if excess <= 0 or entry.used > time.time() - IN_USE:
            return
        if entry.path.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            entry.path.unlink(missing_ok=True)
        excess -= entry.size
