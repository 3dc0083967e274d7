"""Token streams: text tokenized once into cached shards, or shards as they are, read as one long sequence."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from specc.runtime.data.corpus import Corpus, find_corpus
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.record import HINT, RECORD, read_record
from specc.runtime.data.shards import Split, TokenShard, find_shards, shard_offset, sync_folder
from specc.runtime.data.tokenized import SHARD_TOKENS, require_16_bits, require_bos, write_shards
from specc.runtime.data.tokenizer import Tokenizer

FORMAT = 2  # of the cache; 1 cut a file with a long first document
_RECORD = "stream.json"
_FINGERPRINT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class TokenStream:
    """All tokens of one split as one sequence; every document is BOS and then its tokens.

    Attributes:
        shards: the files, in order.
        starts: first position of each shard, and the total at the end.
        vocab: of the tokenizer; every token read is below it.
        documents: number of documents; None where no record tells.
        document_bytes: bytes of the documents as they stand in the source, separators not counted; None
            likewise.
        tokenizer_digest: of the tokenizer that wrote the tokens; None likewise.
        digest: SHA-256 (hex) of the tokens; for shards with a record, of their digests; for shards without, of
            their names, counts and both ends.
    """

    shards: tuple[TokenShard, ...]
    starts: tuple[int, ...]
    vocab: int
    documents: int | None
    document_bytes: int | None
    tokenizer_digest: str | None
    digest: str

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def read(self, start: int, count: int) -> npt.NDArray[np.uint16]:
        """Tokens [start, start + count) as a new uint16 array [count]. Safe to call from several threads.

        Raises:
            IndexError: the range leaves the stream.
            DataIntegrityError: a shard was cut, or holds a token that the tokenizer does not have.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of a stream of {self.tokens}")
        tokens = np.empty(count, np.uint16)
        filled = 0
        index = bisect.bisect_right(self.starts, start) - 1
        while filled < count:
            shard, offset = self.shards[index], start + filled - self.starts[index]
            part = shard.read(offset, min(count - filled, shard.tokens - offset))
            if part.size and int(part.max()) >= self.vocab:
                first = int(np.argmax(part >= self.vocab))
                raise DataIntegrityError(
                    f"{shard.path}: holds token {int(part[first])}, but the tokenizer has {self.vocab:,} "
                    f"(at byte {shard_offset(offset + first):,})",
                    "open the shards with the tokenizer that wrote them",
                )
            tokens[filled : filled + part.size] = part
            filled += part.size
            index += 1
        return tokens

    def require_scorable(self, tokenizer: Tokenizer) -> None:
        """Raises DataError unless the first token is BOS, which has no bytes and is no target, and others follow."""
        if self.tokens < 2:
            raise DataError(f"nothing to score: the stream has {self.tokens} tokens", "give more text to validate on")
        opening = int(self.read(0, 1)[0])
        if opening != tokenizer.bos:
            raise DataError(
                f"the stream starts with token {opening}, not with the separator {tokenizer.bos} of "
                f"{tokenizer.name}, so its first token could not be scored",
                "give shards that have the separator before each document",
            )

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def open_stream(
    source: str | Path,
    split: Split,
    tokenizer: Tokenizer,
    cache: Path,
    progress: Callable[[int], None] | None = None,
) -> TokenStream:
    """Open one split of a source as a stream of tokens.

    Text is tokenized on first use into `cache`; an entry's name is a digest of the files (path, size, time of
    change), the split and the tokenizer, so a changed file gets a new entry. An entry is a folder that is
    renamed into place when complete: two processes may ask at once (one builds, the other waits), and one
    that is killed leaves only a temporary folder, which the next build removes. Shards (`find_shards`) are
    opened where they are, and held to the record of `specc data`, if one lies beside them; val must be one that can be
    scored, which is better known before the training than behind it.

    Args:
        progress: called with the bytes of documents tokenized so far.

    Raises:
        DataError: the vocabulary has more than 65,536 ids or no BOS, the source is unusable, val does not begin with
            BOS or holds nothing else, or the disk is full.
        DataIntegrityError: a shard is damaged.
    """
    require_16_bits(tokenizer)
    paths = find_shards(source, split)
    if paths is not None:
        stream = _open_shards(paths, split, tokenizer, whole=Path(source).expanduser().is_dir())
        if split == "val":
            stream.require_scorable(tokenizer)
        return stream
    require_bos(tokenizer)
    corpus = find_corpus(source, split)
    key = _key(corpus, tokenizer)
    folder = Path(cache) / f"{split}-{key[:32]}"
    try:
        if not (folder / _RECORD).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(folder.name + ".lock")):
                if not (folder / _RECORD).exists():
                    _build(corpus, tokenizer, folder, key, progress)
    except OSError as error:
        raise DataError(f"{folder}: cannot write the token cache: {error.strerror or error}") from error
    return _open_cached(folder, tokenizer)


def _key(corpus: Corpus, tokenizer: Tokenizer) -> str:
    facts = [FORMAT, corpus.listing(), corpus.in_val is not None, corpus.split, tokenizer.digest(), tokenizer.bos]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _build(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, key: str, progress: Callable[[int], None] | None
) -> None:
    """Fill a temporary folder and rename it to `folder`. Called under the entry's lock."""
    _remove_strays(folder)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        record = _tokenize(corpus, tokenizer, temporary, progress)
        if _key(corpus, tokenizer) != key:
            raise DataError(f"{corpus.source}: changed while it was being tokenized", "run again when it is complete")
        with open(temporary / _RECORD, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_strays(folder: Path) -> None:
    """Remove what killed builds left: of this entry, and of others that nobody is building now."""
    shutil.rmtree(folder, ignore_errors=True)
    for stray in folder.parent.glob(".*.tmp"):
        entry = stray.name.removeprefix(".").split(".")[0]
        with contextlib.suppress(Timeout):
            lock = FileLock(folder.with_name(entry + ".lock"), timeout=0)
            with contextlib.nullcontext() if entry == folder.name else lock:
                shutil.rmtree(stray, ignore_errors=True)


def _tokenize(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    found = write_shards(corpus, tokenizer, folder, "{:06d}.bin", SHARD_TOKENS, progress=progress)
    return {
        "format": FORMAT,
        "source": corpus.source,
        "split": corpus.split,
        "tokenizer": tokenizer.name,
        "tokenizer_digest": tokenizer.digest(),
        "vocab": tokenizer.vocab,
        "documents": found.documents,
        "document_bytes": found.document_bytes,
        "tokens": sum(found.shards.values()),
        "shards": list(found.shards.values()),
        "sha256": found.sha256,
    }


def _open_cached(folder: Path, tokenizer: Tokenizer) -> TokenStream:
    hint = f"delete {folder}; it is made again from the source"
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        counts, documents, size = (
            list(record["shards"]),
            int(record["documents"]),
            int(record["document_bytes"]),
        )
        digest = str(record["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataIntegrityError(f"{folder / _RECORD}: unreadable", hint) from None
    try:
        shards = tuple(TokenShard(folder / f"{index:06d}.bin") for index in range(len(counts)))
    except DataError as error:
        raise DataIntegrityError(error.message, hint) from None
    if [shard.tokens for shard in shards] != counts or record.get("tokenizer_digest") != tokenizer.digest():
        raise DataIntegrityError(f"{folder}: the shards are not those that {_RECORD} describes", hint)
    return TokenStream(shards, _starts(shards), tokenizer.vocab, documents, size, tokenizer.digest(), digest)


def _open_shards(paths: list[Path], split: Split, tokenizer: Tokenizer, whole: bool) -> TokenStream:
    """Shards where they are. `whole` says that they should be all that a record beside them lists."""
    record = read_record(paths[0].parent) if len({path.parent for path in paths}) == 1 else None
    if record is not None:
        record.require(tokenizer, paths[0].parent)
    shards = tuple(TokenShard(path) for path in paths)
    if record is None:
        return TokenStream(shards, _starts(shards), tokenizer.vocab, None, None, None, _fingerprint(shards))
    listed = record.entries(split)
    for shard in shards:
        entry = listed.get(shard.path.name)
        if entry is None or entry.tokens != shard.tokens:
            raise DataIntegrityError(f"{shard.path}: not the shard that {RECORD} describes", HINT)
    if whole and (missing := sorted(listed.keys() - {path.name for path in paths})):
        raise DataIntegrityError(f"{paths[0].parent}: lacks {missing[0]}, which {RECORD} lists", HINT)
    found = record.splits[split] if len(shards) == len(listed) else None
    digest = hashlib.sha256("\n".join(listed[path.name].sha256 for path in paths).encode()).hexdigest()
    return TokenStream(
        shards,
        _starts(shards),
        tokenizer.vocab,
        found.documents if found else None,
        found.document_bytes if found else None,
        record.tokenizer_digest,
        digest,
    )


def _fingerprint(shards: tuple[TokenShard, ...]) -> str:
    hasher = hashlib.sha256()
    for shard in shards:
        ends = min(shard.tokens, _FINGERPRINT_TOKENS)
        hasher.update(f"{shard.path.name} {shard.tokens}\n".encode())
        hasher.update(shard.read(0, ends).astype("<u2").data)
        hasher.update(shard.read(shard.tokens - ends, ends).astype("<u2").data)
    return hasher.hexdigest()


def _starts(shards: tuple[TokenShard, ...]) -> tuple[int, ...]:
    return tuple(accumulate((shard.tokens for shard in shards), initial=0))
