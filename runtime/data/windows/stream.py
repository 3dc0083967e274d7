"""Token streams: text tokenized once into cached shards, or shards as they are, read as one long sequence."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.record import HINT, RECORD, read_record
from specc.runtime.data.shards.shard_file import TokenShard, find_shards, shard_offset
from specc.runtime.data.shards.token_cache import open_cached
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer, require_16_bits

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
    opened where they are, and compared with the record of `specc data`, if one lies beside them. The val split must be
    one that can be scored, so that a run does not end with data that cannot.

    Args:
        progress: called with the bytes of documents tokenized so far.

    Raises:
        DataError: the vocabulary has more than 65,536 ids or no BOS, the source is unusable, or val does not begin with
            BOS or holds nothing else.
        DataIntegrityError: a shard is damaged.
        EnvironmentFailure: the cache cannot be written, for a full disk or another reason.
    """
    require_16_bits(tokenizer)
    paths = find_shards(source, split)
    if paths is not None:
        stream = _open_shards(paths, split, tokenizer, whole=Path(source).expanduser().is_dir())
        if split == "val":
            stream.require_scorable(tokenizer)
        return stream
    cached = open_cached(source, split, tokenizer, cache, progress)
    starts, digest = _starts(cached.shards), tokenizer.digest()
    return TokenStream(
        cached.shards, starts, tokenizer.vocab, cached.documents, cached.document_bytes, digest, cached.digest
    )


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
    entry_of_split = record.splits[split] if len(shards) == len(listed) else None
    digest = hashlib.sha256("\n".join(listed[path.name].sha256 for path in paths).encode()).hexdigest()
    return TokenStream(
        shards,
        _starts(shards),
        tokenizer.vocab,
        entry_of_split.documents if entry_of_split else None,
        entry_of_split.document_bytes if entry_of_split else None,
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
