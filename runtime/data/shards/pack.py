"""Packs text into a folder of token shards. The folder gets its name only when it is complete."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specc.compiler.spec.data.text import TextData
from specc.runtime.data.documents.corpus import split_corpus
from specc.runtime.data.documents.formats import Bounds
from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.digests import sha256_of
from specc.runtime.data.shards.record import Marks, ShardEntry, ShardRecord, SplitEntry, begin_record, write_record
from specc.runtime.data.shards.tokenize import SHARD_TOKENS, write_shards
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.open import open_tokenizer, tokenizer_files
from specc.runtime.data.tokenizers.tokenizer import require_bos
from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import sync_folder

Progress = Callable[[Split, int], None]
# Val is packed first: it is small, so that an empty val split is reported early
SPLITS: tuple[Split, ...] = ("val", "train")


@dataclass(frozen=True, slots=True)
class PackOptions:
    """The text to pack, and the options of packing.

    Attributes:
        sources, validation, share, bounds: the arguments of `specc.runtime.data.documents.corpus.split_corpus`.
        out: the folder to create. The folder must not exist, or must be empty. If `out` is a link, its target becomes
            the folder.
        tokenizer: a name for `open_tokenizer`, or the field `train.data` of a spec. The tokenizer file is copied into
            the folder.
        name: the prefix of the shard names, which have the form `NAME_train_000000.bin`. Other training programs expect
            this form.
        marks: `document` writes BOS before every document. `none` writes BOS only at the start of a split, where
            scoring requires it.
        shard_tokens: the number of tokens in each shard, except the last shard of a split.
        search: folders to search for the tokenizer.
    """

    sources: tuple[str, ...]
    out: Path
    tokenizer: str | TextData
    validation: tuple[str, ...] = ()
    share: float | None = None
    bounds: Bounds | None = None
    marks: Marks = "document"
    shard_tokens: int = SHARD_TOKENS
    search: tuple[Path, ...] = ()
    name: str = "tokens"


def pack(
    options: PackOptions, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> ShardRecord:
    """Creates a folder of token shards. The same input gives the same bytes.

    If the tokenizer is not lossless, a byte-count file is written for each val shard. The file has the number of bytes
    of each token, which the computation of bits per byte needs.

    An interrupted call leaves a folder `.NAME.packing` next to the folder NAME. The next call for NAME empties and uses
    this folder.

    Args:
        options: the text to pack, and the options of packing.
        progress: called with the split and the number of document bytes tokenized so far.
        say: called with a message if a file of the sources is in neither split.

    Returns:
        The record of the folder.

    Raises:
        DataError: if a source or the tokenizer cannot be used, a source changes during packing, or `out` exists or is
            in use by another process.
        DataIntegrityError: if a compressed file is damaged.
        EnvironmentFailure: if the folder cannot be written.
    """
    tokenizer = open_tokenizer(options.tokenizer, options.search)
    tokenizer_name = options.tokenizer if isinstance(options.tokenizer, str) else options.tokenizer.tokenizer
    require_bos(tokenizer)
    corpora = split_corpus(options.sources, options.validation, options.share, options.bounds)
    for corpus in corpora.values():
        corpus.require_files()
    left = corpora["train"].left_out
    if left and say is not None:
        more = f" and {len(left) - 3:,} more" * (len(left) > 3)
        say(f"left out, because their names begin with neither train nor val: {', '.join(left[:3])}{more}")
    listings = [corpus.listing() for corpus in corpora.values()]
    name = ", ".join(Path(source).absolute().name for source in options.sources)  # only the last component of each path
    out = options.out.expanduser().resolve()
    with _staged(out) as folder:
        for file in tokenizer_files(tokenizer_name, options.search):
            _copy(file, folder / file.name)
        splits: dict[Split, SplitEntry] = {}
        for split in SPLITS:
            report = None if progress is None else _of(progress, split)
            name_of, size, corpus = f"{options.name}_{split}_{{:06d}}.bin", options.shard_tokens, corpora[split]
            written = write_shards(
                corpus,
                tokenizer,
                folder,
                name_of,
                size,
                options.marks,
                report,
                byte_counts=split == "val" and not tokenizer.lossless,
            )
            splits[split] = SplitEntry(
                documents=written.documents,
                document_bytes=written.document_bytes,
                shards=tuple(
                    ShardEntry(name=file, tokens=tokens, sha256=sha256_of(folder / file))
                    for file, tokens in written.shards.items()
                ),
            )
        if [corpus.listing() for corpus in corpora.values()] != listings:
            raise DataError(f"{name} changed during packing", "run again when the files no longer change")
        record = ShardRecord.of(name, tokenizer, options.marks, splits)
        write_record(folder, record)
    return record


def _of(progress: Progress, split: Split) -> Callable[[int], None]:
    return lambda done: progress(split, done)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A context manager that yields an empty, locked folder, and renames it to `out` at the end.

    The folder is deleted if the `with` block fails. Raises DataError if `out` has content, or if another process packs
    into `out`. Raises EnvironmentFailure if the folder cannot be written.
    """
    staging = out.with_name(f".{out.name}.packing")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        left = f"; {staging}, which an interrupted run left, can be removed" * staging.is_dir()
        raise DataError(f"{out} already exists", f"name another --out, or remove this folder{left}")
    if staging.exists() and not staging.is_dir():
        raise DataError(f"{staging} exists and is not a folder", "remove it")
    try:
        staging.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise cannot_write(out, error, "name another --out") from error
    try:
        _lock(descriptor, staging, out)
        try:
            if out.exists():
                _require_replaceable(out)
            for stray in staging.iterdir():  # files that an interrupted run left
                shutil.rmtree(stray) if stray.is_dir() and not stray.is_symlink() else stray.unlink()
            begin_record(staging)
            yield staging
            os.rename(staging, out)
            sync_folder(out.parent)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise cannot_write(out, error, "name another --out") from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _require_replaceable(out: Path) -> None:
    aside = out.with_name(f".{out.name}.aside")
    try:
        out.rename(aside)
    except OSError as error:
        what = f"{out} cannot be replaced by another folder: {error.strerror or error}"
        raise DataError(what, f"name a folder in it: --out {out / 'packed'}") from error
    aside.rename(out)


def _lock(descriptor: int, staging: Path, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(descriptor), os.stat(staging))
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        hint = "wait until it has finished, or name another --out"
        raise DataError(f"another process packs into {out}", hint)
