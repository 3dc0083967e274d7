"""Tokenizes documents and writes them as shards of a fixed size. A BOS token can precede each document."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.documents.corpus import Corpus
from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.record import Marks
from specc.runtime.data.shards.shard_file import NARROW, ShardWriter, byte_counts_of, format_for
from specc.runtime.data.tokenizers.tokenizer import TokenArray, Tokenizer

SHARD_TOKENS = 100_000_000
BATCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    """The shards of a split that were written.

    Attributes:
        documents: the number of documents.
        document_bytes: the total size of the documents in bytes.
        shards: the number of tokens in each file, by file name.
        sha256: the SHA-256 (hex) of all tokens, as the little-endian u16 or u32 that the shards store.
    """

    documents: int
    document_bytes: int
    shards: dict[str, int]
    sha256: str


def write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    name: str,
    shard_tokens: int,
    marks: Marks = "document",
    progress: Callable[[int], None] | None = None,
    byte_counts: bool = False,
) -> Written:
    """Tokenizes the documents of a split, and writes the tokens as shards. A document may continue in the next shard.

    Args:
        corpus: the files of the split.
        tokenizer: the tokenizer.
        folder: the folder to write to.
        name: a format string for file names, such as "{:06d}.bin". The argument of the format string is the index of
            the shard.
        shard_tokens: the number of tokens in every shard except the last.
        marks: whether BOS is written before each document, or only before the first.
        byte_counts: whether to also write a byte-count file for each shard, with the size in bytes of each token.
        progress: called with the number of document bytes tokenized so far.

    Returns:
        The shards that were written.

    Raises:
        DataError: if a document cannot be read or tokenized.
        OSError: if a shard cannot be written, for example because the disk is full.
    """
    hasher = hashlib.sha256()
    form = format_for(tokenizer.vocab)
    bos = np.array([tokenizer.bos], form.dtype)
    documents = document_bytes = 0
    shards: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        writer: ShardWriter | None = None
        counter: ShardWriter | None = None
        for batch in _batches(corpus.documents()):
            try:
                encoded = tokenizer.encode_batch(batch)
            except DataError as error:
                place = f"{corpus.source}, {corpus.split} documents from number {documents + 1:,} on"
                raise DataError(f"{place}: {error.message}", error.hint) from None
            if marks == "document":
                parts = [part for ids in encoded for part in (bos, ids)]
            else:
                parts = [*([] if documents else [bos]), *encoded]
            tokens = np.concatenate(parts).astype(form.dtype)
            if byte_counts:
                counts = _byte_counts(tokenizer, batch, encoded, [part is bos for part in parts])
            hasher.update(tokens.data)
            while tokens.size:
                if writer is None or writer.tokens == shard_tokens:
                    stack.close()
                    writer = stack.enter_context(ShardWriter(folder / name.format(len(shards)), form))
                    if byte_counts:
                        counter = stack.enter_context(ShardWriter(byte_counts_of(writer.path)))
                part, tokens = np.split(tokens, [shard_tokens - writer.tokens])
                writer.write(part)
                if counter is not None:
                    size, counts = np.split(counts, [len(part)])
                    counter.write(size)
                shards[writer.path.name] = writer.tokens
            documents += len(batch)
            document_bytes += sum(map(len, batch))
            if progress is not None:
                progress(document_bytes)
    return Written(documents, document_bytes, shards, hasher.hexdigest())


def _byte_counts(
    tokenizer: Tokenizer, texts: Sequence[bytes], encoded: Sequence[TokenArray], marks: Sequence[bool]
) -> npt.NDArray[np.int64]:
    documents = iter([tokenizer.byte_counts(text, ids) for text, ids in zip(texts, encoded, strict=True)])
    counts = np.concatenate([np.zeros(1, np.int64) if mark else next(documents) for mark in marks])
    if counts.size and int(counts.max()) > NARROW.highest:
        raise DataError(
            f"{tokenizer.name}: one token represents {int(counts.max()):,} bytes of a document, too many for a shard",
            "split the document",
        )
    return counts


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
