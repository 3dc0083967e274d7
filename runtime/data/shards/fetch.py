"""Downloads token shards from the Hugging Face hub for `specc data fetch`. No other part of specc uses the network."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.pack import sha256_of
from specc.runtime.data.shards.record import (
    RECORD,
    ShardEntry,
    ShardRecord,
    SplitEntry,
    begin_record,
    read_record,
    write_record,
)
from specc.runtime.data.shards.shard_file import TokenShard, split_of
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.errors import EnvironmentFailure, cannot_write
from specc.runtime.storage.atomic import sync_folder

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubSet:
    """Shards and their tokenizer in a dataset repository. `folder` and `tokenizer` are paths in the repository."""

    repository: str
    folder: str
    tokenizer: str


def _fineweb(repository: str, vocab: int) -> HubSet:
    """Returns a set with the folder layout of the exports of the parameter-golf challenge."""
    folder, name = f"datasets/datasets/fineweb10B_sp{vocab}", f"fineweb_{vocab}_bpe.model"
    return HubSet(repository, folder, f"datasets/tokenizers/{name}")


SETS: Mapping[str, HubSet] = {
    "fineweb-sp1024": _fineweb("willdepueoai/parameter-golf", 1024),
    "fineweb-sp8192": _fineweb("kevclark/parameter-golf", 8192),
}


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file in the repository.

    `size` is in bytes. `sha256` is None if the hub stores the file in git and not in LFS; `blob` is then its git id.
    """

    path: str
    size: int
    sha256: str | None
    blob: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @classmethod
    def of(cls, entry: Any) -> _Remote:
        sha256 = str(entry.lfs.sha256) if entry.lfs is not None else None
        return cls(str(entry.path), int(entry.size), sha256, str(entry.blob_id))

    def fault(self, path: Path) -> str | None:
        """Returns how the file at `path` differs from this file; None if it is identical."""
        size = path.stat().st_size
        if size != self.size:
            return f"{size:,} bytes, not {self.size:,}"
        if self.sha256 is not None:
            return None if sha256_of(path) == self.sha256 else "its SHA-256 differs from that on the hub"
        data = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        return None if digest == self.blob else "its git id differs from that on the hub"


def fetch(
    name: str, out: Path, shards: int, say: Say, repository: str | None = None, revision: str | None = None
) -> ShardRecord:
    """Downloads the tokenizer, all val shards and the first `shards` train shards of a set into `out`.

    Every file is compared with the size and the digest that the hub states before it is renamed to its final name.
    Existing files are compared too, and not downloaded again. An interrupted download can therefore be resumed, and
    more shards can be added later. A complete folder remains usable until all additional shards are downloaded. The
    record is written last.

    Args:
        name: a key of SETS.
        out: the folder to write to.
        shards: number of train shards.
        say: called with a message for each file.
        repository: another repository to download from; None selects the repository of the set.
        revision: a branch, tag or commit; None selects the default branch.

    Returns:
        The record of the folder.

    Raises:
        DataError: the set has fewer shards or no tokenizer, or `out` contains other data.
        DataIntegrityError: a downloaded file does not match the digest or size that the hub states.
        EnvironmentFailure: huggingface_hub is not installed, the hub does not respond or denies access, or the folder
            cannot be written.
    """
    hub, wanted = _hub(), SETS[name]
    where = repository or wanted.repository
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is not a folder", "name another --out")
    before = _previous(out, name)
    with _requests(where):
        api = hub.HfApi()
        commit = str(api.dataset_info(where, revision=revision).sha)
        listed = [*api.list_repo_tree(where, wanted.folder, repo_type="dataset", revision=commit)]
        listed += api.get_paths_info(where, [wanted.tokenizer], repo_type="dataset", revision=commit)
    remote = {entry.path: _Remote.of(entry) for entry in listed if hasattr(entry, "blob_id")}  # others are folders
    chosen = _chosen(remote, wanted, shards, f"{where} at {commit[:12]}", out)
    say(f"{where} at {commit[:12]}: {len(chosen)} files, {sum(file.size for file in chosen):,} bytes")
    try:
        missing = [file for file in chosen if not _is_present(file, out, say)]
        listed_before = {*before.entries("train"), *before.entries("val"), chosen[0].name} if before else set()
        complete = before is not None and listed_before.isdisjoint(file.name for file in missing)
        (out / _DOWNLOADS).mkdir(parents=True, exist_ok=True)
        (out / _SET).write_text(name, encoding="utf-8")
        if not complete:
            begin_record(out)
        downloads = []
        for file in missing:
            downloads.append(_download(hub, where, commit, file, out, say))
            if not complete:
                _move(downloads, out)
        if downloads:
            begin_record(out)  # the previous record does not list the new shards
            _move(downloads, out)
        record = _record(f"{name}: {where} at {commit}", chosen, out)
        write_record(out, record)
    except OSError as error:
        raise cannot_write(out, error, "name another --out") from error
    shutil.rmtree(out / _DOWNLOADS, ignore_errors=True)
    return record


_DOWNLOADS = ".downloads"
_SET = f"{_DOWNLOADS}/set"  # a file with the name of the set that is being downloaded


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise EnvironmentFailure("huggingface_hub is not installed", "pip install 'specc[hub]'") from None
    return huggingface_hub


@contextmanager
def _requests(repository: str) -> Iterator[None]:
    """Converts all exceptions to EnvironmentFailure, because the hub's client passes on any error of its transport."""
    try:
        yield
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise EnvironmentFailure(
            f"cannot fetch from the hub ({repository}): {type(error).__name__}: {first}",
            "check the network, the repository and your access to it, then run it again: completed files are kept",
        ) from error


def _previous(out: Path, name: str) -> ShardRecord | None:
    """Returns the record of a complete download of the set, or None if it was interrupted or `out` is new or empty.

    Raises DataError if the folder contains other data.
    """
    record, same = None, False
    with suppress(FileNotFoundError):
        same = (out / _SET).read_text(encoding="utf-8") == name
    try:
        record = read_record(out)
    except DataIntegrityError as error:
        if (out / RECORD).stat().st_size:
            raise DataError(f"the content of {out} is unknown: {error.message}", "name another --out") from None
    else:
        same = record.source.startswith(f"{name}: ") if record is not None else same or not any(out.glob("*"))
    if not same:
        raise DataError(f"{out} contains other data", "name another --out")
    return record


def _chosen(remote: Mapping[str, _Remote], wanted: HubSet, shards: int, where: str, out: Path) -> list[_Remote]:
    """Returns the files to download, the tokenizer first, including train shards that are already in `out`.

    Raises DataError if the repository lacks the tokenizer, val shards, or enough train shards.
    """
    files = [file for _, file in sorted(remote.items()) if file.name.endswith(".bin")]
    train, val = ([file for file in files if split_of(file.name) == split] for split in ("train", "val"))
    if wanted.tokenizer not in remote or not val:
        missing = wanted.tokenizer if wanted.tokenizer not in remote else f"{wanted.folder}/*_val_*.bin"
        raise DataError(f"{where} has no {missing}", "name another --repo or --revision")
    if len(train) < shards:
        raise DataError(f"{where} has {len(train):,} train shards, not {shards:,}", f"--shards {len(train)}")
    present = [index for index, file in enumerate(train, 1) if (out / file.name).exists()]
    return [remote[wanted.tokenizer], *val, *train[: max([shards, *present])]]


def _is_present(file: _Remote, out: Path, say: Say) -> bool:
    if not (out / file.name).is_file():
        return False
    fault = file.fault(out / file.name)
    say(f"{file.name}: present" if fault is None else f"{file.name}: differs from the file on the hub; fetched again")
    return fault is None


def _download(hub: Any, repository: str, commit: str, file: _Remote, out: Path, say: Say) -> Path:
    """Downloads a file and returns its temporary path.

    Raises DataIntegrityError if the file does not match the size or digest that the hub states.
    """
    with _requests(repository):
        path = Path(
            hub.hf_hub_download(repository, file.path, repo_type="dataset", revision=commit, local_dir=out / _DOWNLOADS)
        )
    fault = file.fault(path)
    if fault is not None:
        path.unlink()
        raise DataIntegrityError(f"{file.name}: the download is damaged: {fault}", "run it again")
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
    say(f"{file.name}: {file.size:,} bytes")
    return path


def _move(downloads: list[Path], out: Path) -> None:
    """Renames the downloads to their final names, and empties the list."""
    while downloads:
        path = downloads.pop()
        os.replace(path, out / path.name)
    sync_folder(out)


def _record(source: str, chosen: list[_Remote], out: Path) -> ShardRecord:
    entries: dict[Split, list[ShardEntry]] = {"train": [], "val": []}
    for file in chosen[1:]:
        with closing(TokenShard(out / file.name)) as shard:
            split = split_of(file.name)
            assert split is not None
            digest = file.sha256 or sha256_of(shard.path)
            entries[split].append(ShardEntry(name=file.name, tokens=shard.tokens, sha256=digest))
    splits = {
        split: SplitEntry(documents=None, document_bytes=None, shards=tuple(shards))
        for split, shards in entries.items()
    }
    return ShardRecord.of(source, open_tokenizer(str(out / chosen[0].name)), "document", splits)
