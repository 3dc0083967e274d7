"""Writes documents as token shards: BOS and the tokens of each document, divided into shards of fixed size."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specc.runtime.data.documents.corpus import Corpus
from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.record import Marks
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.tokenizer import Tokenizer

SHARD_TOKENS = 100_000_000
BATCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    """The written shards of a split.

    Attributes:
        documents: number of documents.
        document_bytes: bytes of the documents in the source.
        shards: number of tokens of each file, by file name.
        sha256: SHA-256 (hex) of all tokens as little-endian u16.
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
) -> Written:
    """Writes a split as shards. A document may continue from one shard to the next.

    Args:
        corpus: the documents.
        tokenizer: the tokenizer, with ids below 65,536.
        folder: the folder to write to.
        name: format string for file names, with the index of the shard as its argument.
        shard_tokens: number of tokens of every shard except the last.
        marks: BOS before each document, or only before the first.
        progress: called with the number of document bytes tokenized so far.

    Returns:
        The shards that were written.

    Raises:
        DataError: a document cannot be read or tokenized.
        OSError: a shard cannot be written, for example because the disk is full.
    """
    hasher = hashlib.sha256()
    bos = np.array([tokenizer.bos], np.uint16)
    documents = document_bytes = 0
    shards: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        writer: ShardWriter | None = None
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
            tokens = np.concatenate(parts).astype("<u2")
            hasher.update(tokens.data)
            while tokens.size:
                if writer is None or writer.tokens == shard_tokens:
                    stack.close()
                    writer = stack.enter_context(ShardWriter(folder / name.format(len(shards))))
                part, tokens = np.split(tokens, [shard_tokens - writer.tokens])
                writer.write(part)
                shards[writer.path.name] = writer.tokens
            documents += len(batch)
            document_bytes += sum(map(len, batch))
            if progress is not None:
                progress(document_bytes)
    return Written(documents, document_bytes, shards, hasher.hexdigest())


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
