"""Lists files on the Hugging Face hub with their sizes and digests. Downloads files and verifies them."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specc.runtime.data.errors import DataIntegrityError
from specc.runtime.data.shards.digests import sha256_of
from specc.runtime.errors import EnvironmentFailure

Say = Callable[[str], None]
Kind = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository on the hub, at a fixed commit."""

    name: str
    kind: Kind
    commit: str

    def __str__(self) -> str:
        return f"{self.name} at {self.commit[:12]}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a repository on the hub.

    `size` is in bytes. `sha256` is None if the hub stores the file in git instead of LFS. `blob` is the git object id
    of the file.
    """

    path: str
    size: int
    sha256: str | None
    blob: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @classmethod
    def of(cls, entry: Any) -> "RemoteFile":
        sha256 = str(entry.lfs.sha256) if entry.lfs is not None else None
        return cls(str(entry.path), int(entry.size), sha256, str(entry.blob_id))

    def fault(self, path: Path) -> str | None:
        """Compares the file at `path` with the file on the hub. Returns a description of the difference, or None if the
        files are identical.
        """
        size = path.stat().st_size
        if size != self.size:
            return f"{size:,} bytes, not {self.size:,}"
        if self.sha256 is not None:
            return None if sha256_of(path) == self.sha256 else "its SHA-256 differs from that on the hub"
        data = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        return None if digest == self.blob else "its git id differs from that on the hub"


def client() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise EnvironmentFailure("huggingface_hub is not installed", "pip install 'specc[hub]'") from None
    return huggingface_hub


@contextmanager
def requests(repository: str) -> Iterator[None]:
    """A context manager for requests to a repository. It converts every exception to EnvironmentFailure, because the
    client library of the hub raises exceptions of many libraries.
    """
    try:
        yield
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise EnvironmentFailure(
            f"cannot fetch from the hub ({repository}): {type(error).__name__}: {first}",
            "check the network, the repository and your access, then run the command again; it resumes the download",
        ) from error


def download(repository: Repository, file: RemoteFile, folder: Path, say: Say) -> Path:
    """Downloads a file of a repository.

    Args:
        repository: the repository, at a commit.
        file: the file, with the size and digest that the hub states.
        folder: the folder to write to. The file has the same relative path in this folder as in the repository.
        say: called with a message about the file.

    Returns:
        The path of the file below `folder`.

    Raises:
        DataIntegrityError: if the downloaded file does not have the size or digest that the hub states.
        EnvironmentFailure: if the download fails.
    """
    with requests(repository.name):
        path = Path(
            client().hf_hub_download(
                repository.name, file.path, repo_type=repository.kind, revision=repository.commit, local_dir=folder
            )
        )
    fault = file.fault(path)
    if fault is not None:
        path.unlink()
        raise DataIntegrityError(f"{file.name}: the download is damaged: {fault}", "run the command again")
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
    say(f"{file.name}: {file.size:,} bytes")
    return path
