"""Packs documents into rows by the best-fit method of nanochat (July 2026).

A document is BOS followed by its tokens. Rows are filled from a buffer of documents. The largest document that fits
into the free space of the row is added to the row. This step repeats as long as a document fits. The beginning of the
shortest document of the buffer then completes the row, and the rest of this document is dropped. Rows have no padding,
and every row begins with BOS.
"""

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specc.runtime.data.shards.shard_file import Tokens
from specc.runtime.data.windows.stream import TokenStream

BUFFER = 1000  # the number of documents to choose from
_PIECE = 4 * 1024 * 1024  # the number of tokens per read in the search for BOS


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row that is packed with documents.

    Attributes:
        parts: pairs (index, count), in the order of the row. A pair stands for the first `count` tokens of document
            `index`.
        cropped: the number of tokens of the last document that are dropped.
    """

    parts: tuple[tuple[int, int], ...]
    cropped: int


def best_fit(documents: Iterable[tuple[int, int]], capacity: int, buffer: int = BUFFER) -> Iterator[PackedRow]:
    """Packs documents into full rows, and yields the rows. Drops the last documents if they cannot fill a row.

    Args:
        documents: pairs (index, length in tokens), in the order in which the documents enter the buffer.
        capacity: the number of tokens in a row.
        buffer: the number of documents in the buffer. Among documents of equal length, the earliest document is chosen.
    """
    coming = enumerate(documents)
    waiting: list[tuple[int, int, int]] = []  # sorted triples (length, place in the order, index)
    more = True
    while True:
        parts: list[tuple[int, int]] = []
        room, cropped = capacity, 0
        while room:
            while more and len(waiting) < buffer:
                place, (index, length) = next(coming, (-1, (-1, -1)))
                more = place >= 0
                if more:
                    bisect.insort(waiting, (length, place, index))
            if not waiting:
                return
            end = bisect.bisect_right(waiting, room, key=lambda entry: entry[0])
            chosen = bisect.bisect_left(waiting, (waiting[end - 1][0],)) if end else 0
            length, _, index = waiting.pop(chosen)
            cropped = max(0, length - room)
            parts.append((index, min(length, room)))
            room -= parts[-1][1]
        yield PackedRow(tuple(parts), cropped)


def document_starts(stream: TokenStream, bos: int) -> npt.NDArray[np.int64]:
    """Returns the position of each BOS of a stream, i64 [documents]."""
    pieces = [
        start + np.flatnonzero(stream.read(start, min(_PIECE, stream.tokens - start)) == bos)
        for start in range(0, stream.tokens, _PIECE)
    ]
    return np.concatenate([np.zeros(0, np.int64), *pieces])


def lengths_from(starts: npt.NDArray[np.int64], tokens: int, first: int) -> Iterator[tuple[int, int]]:
    """Yields a pair (index, length in tokens including BOS) for each document, endlessly. The first pair is document
    `first`. Document 0 follows the last document.

    Args:
        starts: the position of each document in the stream, i64 [documents].
        tokens: the number of tokens in the stream.
        first: the index of the first document.
    """
    lengths = np.diff(starts, append=tokens)
    for index in (*range(first, len(starts)), *range(first)):
        yield index, int(lengths[index])


def read_row(stream: TokenStream, starts: npt.NDArray[np.int64], row: PackedRow) -> Tokens:
    return np.concatenate([stream.read(int(starts[index]), tokens) for index, tokens in row.parts])
