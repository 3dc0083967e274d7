"""Token streams. A stream presents the tokens of shards as one long sequence.

The shards exist already, or are created from text and cached.
"""

import bisect
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.digests import require_recorded
from specc.runtime.data.shards.record import HINT, RECORD, read_record
from specc.runtime.data.shards.shard_file import Tokens, TokenShard, byte_counts_of, find_shards
from specc.runtime.data.shards.token_cache import open_cached
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer

_FINGERPRINT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class TokenStream:
    """All tokens of a split as one sequence. A document is BOS followed by its tokens.

    Attributes:
        shards: the opened shards, in order.
        starts: the position in the stream at which each shard begins, followed by the total number of tokens.
        vocab: the number of ids of the tokenizer. Every token is less than `vocab`.
        documents: the number of documents; None if unknown.
        document_bytes: the total size of the documents in bytes, without separators; None if unknown.
        tokenizer_digest: the digest of the tokenizer that produced the tokens; None if unknown.
        byte_counts: the byte-count file of each shard, with the size in bytes of each token. Empty if the shards have
            no byte-count files.
        digest: a SHA-256 (hex) that identifies the tokens. For shards without a record, the digest covers only the
            names, the numbers of tokens, and the first and last tokens of the shards.
    """

    shards: tuple[TokenShard, ...]
    starts: tuple[int, ...]
    vocab: int
    documents: int | None
    document_bytes: int | None
    tokenizer_digest: str | None
    digest: str
    byte_counts: tuple[TokenShard, ...] = ()

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def read_bytes(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Returns the sizes in bytes of the `count` tokens from position `start` on, i64 [count].

        Thread-safe. Raises IndexError if the range exceeds the stream. Raises DataIntegrityError if a file was
        truncated.
        """
        return np.concatenate([part.astype(np.int64) for _, _, part in self._parts(self.byte_counts, start, count)])

    def read(self, start: int, count: int) -> Tokens:
        """Returns the `count` tokens from position `start` on, as a new u16 or u32 array [count]. Thread-safe.

        Raises:
            IndexError: if the range exceeds the stream.
            DataIntegrityError: if a shard was truncated, or contains a token that is not in the vocabulary.
        """
        tokens = np.empty(max(count, 0), self.shards[0].form.dtype.newbyteorder("="))
        filled = 0
        for shard, offset, part in self._parts(self.shards, start, count):
            if part.size and int(part.max()) >= self.vocab:
                first = int(np.argmax(part >= self.vocab))
                raise DataIntegrityError(
                    f"{shard.path} has token {int(part[first])}, but the tokenizer has {self.vocab:,} ids "
                    f"(at byte {shard.form.file_bytes(offset + first):,})",
                    "open the shards with the tokenizer that wrote them",
                )
            tokens[filled : filled + part.size] = part
            filled += part.size
        return tokens

    def _parts(self, files: tuple[TokenShard, ...], start: int, count: int) -> Iterator[tuple[TokenShard, int, Tokens]]:
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) are not within a stream of {self.tokens}")
        index, end = bisect.bisect_right(self.starts, start) - 1, start + count
        while start < end:
            offset = start - self.starts[index]
            part = files[index].read(offset, min(end - start, files[index].tokens - offset))
            yield files[index], offset, part
            start += part.size
            index += 1

    def require_scorable(self, tokenizer: Tokenizer) -> None:
        """Raises DataError unless the stream begins with BOS and has at least one more token.

        The first token of a stream is never scored, because it has no context. BOS represents no bytes. If the first
        token is BOS, the scores of all later tokens therefore cover all bytes of the text.
        """
        if self.tokens < 2:
            raise DataError(f"nothing to score: the stream has {self.tokens} tokens", "give more text to validate on")
        opening = int(self.read(0, 1)[0])
        if opening != tokenizer.bos:
            raise DataError(
                f"the stream starts with token {opening}, not with the separator {tokenizer.bos} of "
                f"{tokenizer.name}, so the first token could not be scored",
                "use shards with the separator before each document",
            )

    def close(self) -> None:
        for shard in (*self.shards, *self.byte_counts):
            shard.close()


def open_stream(source: str | Path, split: Split, tokenizer: Tokenizer, cache: Path | None) -> TokenStream:
    """Opens one split of a source as a stream of tokens.

    If the source is text, the first call tokenizes the text and stores the tokens in `cache`. If a file changes, the
    text is tokenized again. If two processes open the same text at once, one process tokenizes the text, and the other
    process waits.

    If the source names shards (see `find_shards`), the shards are opened in place. If their folder has a `shards.json`,
    the shards are compared with it. A shard is then read whole, unless it was read before and has not changed.

    Args:
        source: a text source (see `specc.runtime.data.documents.corpus.documents`) or shards.
        split: "train" or "val".
        tokenizer: the tokenizer of the stream.
        cache: the folder of tokenized text, and of notes about shards. None if the source is shards, without notes.

    Returns:
        The stream.

    Raises:
        DataError: if the tokenizer has no BOS token, the source cannot be used, or the val shards do not start with BOS
            and at least one more token.
        DataIntegrityError: if a shard is damaged.
        EnvironmentFailure: if the cache cannot be written, for example because the disk is full.
    """
    paths = find_shards(source, split)
    if paths is not None:
        stream = _open_shards(paths, split, tokenizer, cache, whole=Path(source).expanduser().is_dir())
        if split == "val":
            stream.require_scorable(tokenizer)
        return stream
    assert cache is not None, "text needs a folder for its tokens"
    record, shards = open_cached(source, split, tokenizer, cache)
    vocab, digest = tokenizer.vocab, tokenizer.digest()
    return TokenStream(shards, _starts(shards), vocab, record.documents, record.document_bytes, digest, record.sha256)


def _open_shards(paths: list[Path], split: Split, tokenizer: Tokenizer, cache: Path | None, whole: bool) -> TokenStream:
    """Opens the shards of a split in place, without copying them. Shards that a `shards.json` lists are read whole, and
    compared with it; `cache` has notes of those that need not be read again.

    If `whole` is True, `paths` must have all shards that shards.json lists for the split. Otherwise, an error is
    raised.
    """
    record = read_record(paths[0].parent) if len({path.parent for path in paths}) == 1 else None
    if record is not None:
        record.require(tokenizer, paths[0].parent)
    shards = tuple(TokenShard(path) for path in paths)
    _require_width(shards, tokenizer)
    counts = _byte_counts(shards)
    if record is None:
        return TokenStream(shards, _starts(shards), tokenizer.vocab, None, None, None, _fingerprint(shards), counts)
    listed = record.entries(split)
    for shard in shards:
        entry = listed.get(shard.path.name)
        if entry is None or entry.tokens != shard.tokens:
            raise DataIntegrityError(f"{shard.path}: not the shard that {RECORD} describes", HINT)
        require_recorded(shard.path, entry, cache)
    if whole and (missing := sorted(listed.keys() - {path.name for path in paths})):
        raise DataIntegrityError(f"{paths[0].parent} has no {missing[0]}, which {RECORD} lists", HINT)
    whole_split = record.splits[split] if len(shards) == len(listed) else None
    sizes = (whole_split.documents, whole_split.document_bytes) if whole_split is not None else (None, None)
    digest = hashlib.sha256("\n".join(listed[path.name].sha256 for path in paths).encode()).hexdigest()
    return TokenStream(shards, _starts(shards), tokenizer.vocab, *sizes, record.tokenizer_digest, digest, counts)


def _byte_counts(shards: tuple[TokenShard, ...]) -> tuple[TokenShard, ...]:
    paths = [byte_counts_of(shard.path) for shard in shards]
    if not any(path.exists() for path in paths):
        return ()
    hint = "write the byte counts of every shard again, or remove them all"
    if missing := [path for path in paths if not path.exists()]:
        raise DataIntegrityError(f"{missing[0]}: missing, but other shards have byte counts", hint)
    files = tuple(map(TokenShard, paths))
    for file, shard in zip(files, shards, strict=True):
        if file.tokens != shard.tokens:
            message = f"{file.path} counts the bytes of {file.tokens:,} tokens, but the shard has {shard.tokens:,}"
            raise DataIntegrityError(message, hint)
    return files


def _require_width(shards: tuple[TokenShard, ...], tokenizer: Tokenizer) -> None:
    first = shards[0]
    for shard in shards:
        if shard.form != first.form:
            what = f"has {shard.form.bits}-bit tokens, but {first.path.name} has {first.form.bits}-bit tokens"
            raise DataIntegrityError(
                f"{shard.path}: {what}", "all shards of a stream must have the same width: pack them again"
            )
    if tokenizer.vocab > first.form.highest + 1:
        what = f"{first.form.bits}-bit tokens have no room for the {tokenizer.vocab:,} ids of {tokenizer.name}"
        raise DataError(f"{first.path}: {what}", "pack the text with this tokenizer: `specc data pack`")


def _fingerprint(shards: tuple[TokenShard, ...]) -> str:
    hasher = hashlib.sha256()
    for shard in shards:
        ends = min(shard.tokens, _FINGERPRINT_TOKENS)
        hasher.update(f"{shard.path.name} {shard.tokens}\n".encode())
        for start in (0, shard.tokens - ends):
            hasher.update(shard.read(start, ends).astype(shard.form.dtype).data)
    return hasher.hexdigest()


def _starts(shards: tuple[TokenShard, ...]) -> tuple[int, ...]:
    return tuple(accumulate((shard.tokens for shard in shards), initial=0))
