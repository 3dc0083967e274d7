"""Downloads token shards from the Hugging Face hub for `specc data fetch`. No other part of specc uses the network."""

import os
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.digests import sha256_of
from specc.runtime.data.shards.hub import RemoteFile, Repository, Say, client, download, requests
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
from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import sync_folder


@dataclass(frozen=True, slots=True)
class HubSet:
    """A data set on the Hugging Face hub. Its fields are the repository, the folder of the shards in the repository,
    and the path of the tokenizer.
    """

    repository: str
    folder: str
    tokenizer: str


def _fineweb(repository: str, vocab: int) -> HubSet:
    folder, name = f"datasets/datasets/fineweb10B_sp{vocab}", f"fineweb_{vocab}_bpe.model"
    return HubSet(repository, folder, f"datasets/tokenizers/{name}")


SETS: Mapping[str, HubSet] = {
    "fineweb-sp1024": _fineweb("willdepueoai/parameter-golf", 1024),
    "fineweb-sp8192": _fineweb("kevclark/parameter-golf", 8192),
}


def fetch(
    name: str, out: Path, shards: int, say: Say, repository: str | None = None, revision: str | None = None
) -> ShardRecord:
    """Downloads the tokenizer, all val shards and the first `shards` train shards of a data set into the folder `out`.

    The function checks that each file has the size and the digest that the hub states. If a file in `out` already
    passes this check, it is not downloaded again. A second call therefore resumes an interrupted download, or adds
    shards. During the second call, the shards of an earlier complete download can be used. The record of the folder,
    shards.json, is written last.

    Args:
        name: a key of SETS.
        out: the folder to write to.
        shards: the number of train shards.
        say: called with a message for each file.
        repository: the repository to download from. None selects the repository of the data set in SETS.
        revision: a branch, tag or commit of the repository. None selects the default branch.

    Returns:
        The record of the folder: the list of all files, with digests.

    Raises:
        DataError: if the repository has fewer than `shards` train shards or no tokenizer, or `out` contains other data.
        DataIntegrityError: if a downloaded file does not match the digest or size that the hub states.
        EnvironmentFailure: if huggingface_hub is not installed, the hub does not respond or denies access, or the
            folder cannot be written.
    """
    hub, wanted = client(), SETS[name]
    where = repository or wanted.repository
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is not a folder", "name another --out")
    before = _previous(out, name)
    with requests(where):
        api = hub.HfApi()
        commit = str(api.dataset_info(where, revision=revision).sha)
        listed = [*api.list_repo_tree(where, wanted.folder, repo_type="dataset", revision=commit)]
        listed += api.get_paths_info(where, [wanted.tokenizer], repo_type="dataset", revision=commit)
    source = Repository(where, "dataset", commit)
    # Entries without a blob_id are folders
    remote = {entry.path: RemoteFile.of(entry) for entry in listed if hasattr(entry, "blob_id")}
    chosen = _chosen(remote, wanted, shards, str(source), out)
    say(f"{source}: {len(chosen)} files, {sum(file.size for file in chosen):,} bytes")
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
            downloads.append(download(source, file, out / _DOWNLOADS, say))
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
_SET = f"{_DOWNLOADS}/set"  # while a download is in progress, this file contains the name of the set


def _previous(out: Path, name: str) -> ShardRecord | None:
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


def _chosen(remote: Mapping[str, RemoteFile], wanted: HubSet, shards: int, where: str, out: Path) -> list[RemoteFile]:
    files = [file for _, file in sorted(remote.items()) if file.name.endswith(".bin")]
    train, val = ([file for file in files if split_of(file.name) == split] for split in ("train", "val"))
    if wanted.tokenizer not in remote or not val:
        missing = wanted.tokenizer if wanted.tokenizer not in remote else f"{wanted.folder}/*_val_*.bin"
        raise DataError(f"{where} has no {missing}", "name another --repo or --revision")
    if len(train) < shards:
        raise DataError(f"{where} has {len(train):,} train shards, not {shards:,}", f"--shards {len(train)}")
    present = [index for index, file in enumerate(train, 1) if (out / file.name).exists()]
    return [remote[wanted.tokenizer], *val, *train[: max([shards, *present])]]


def _is_present(file: RemoteFile, out: Path, say: Say) -> bool:
    if not (out / file.name).is_file():
        return False
    fault = file.fault(out / file.name)
    say(f"{file.name}: present" if fault is None else f"{file.name}: differs from the file on the hub; fetched again")
    return fault is None


def _move(downloads: list[Path], out: Path) -> None:
    while downloads:
        path = downloads.pop()
        os.replace(path, out / path.name)
    sync_folder(out)


def _record(source: str, chosen: list[RemoteFile], out: Path) -> ShardRecord:
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
