"""Transforms of the rows of a stream into the raw bytes of a section, and back.

Streams and their cuts follow from the layout (`specc.compiler.quant.artifact_sections`), so that a file states only the
transform of each section.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.compiler.quant.artifact_sections import ITEM_BYTES, Kind, Stream
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.errors import IntegrityError

Matrix = npt.NDArray[Any]

SAMPLE_BYTES = 128 * 2**10
MEASURE_QUALITY = 10  # twice as quick as 11, which it ranks alike; 9 and below do not, having other block splits
MAX_ORDERED = 2**16  # rows that 16 bits can number
_STRIDE = 2  # of shuffled codes


class Transform(IntFlag):
    """What was done to the matrix of a section, in this order. 0 is row by row as it stands.

    ORDERED: rows by rising mean magnitude, with where they came from, u16 a row, in front. TRANSPOSED: column by
    column. SHUFFLED: of items wider than a byte all first bytes, then all second; of codes every second byte first.
    """

    PLAIN = 0
    TRANSPOSED = 1
    SHUFFLED = 2
    ORDERED = 4


T = Transform
KNOWN = int(T.TRANSPOSED | T.SHUFFLED | T.ORDERED)
_OF_CODES = (T.PLAIN, T.TRANSPOSED, T.SHUFFLED, T.ORDERED, T.ORDERED | T.TRANSPOSED)
_OF_ITEMS = (T.SHUFFLED, T.SHUFFLED | T.TRANSPOSED, T.PLAIN)


def raw_size(stream: Stream, rows: int, transform: int) -> int:
    """The raw bytes of a section of so many rows. Raises IntegrityError for a transform that such rows cannot have."""
    if transform & ~KNOWN:
        raise IntegrityError(f"it has the unknown transform {transform}")
    ordered = bool(transform & T.ORDERED)
    if ordered and (rows > MAX_ORDERED or stream.kind != Kind.CODES):
        raise IntegrityError(f"it says that {rows:,} rows of {stream.kind.name.lower()} were ordered")
    return rows * stream.row_bytes + (2 * rows if ordered else 0)


def pack(data: bytes, stream: Stream, transform: int) -> bytes:
    """The raw bytes of a section: `data`, whole rows of `stream`, transformed."""
    matrix = _matrix(data, stream)
    front = b""
    if transform & T.ORDERED:
        order = np.argsort(np.abs(matrix.view(np.int8).astype(np.int16)).sum(1, dtype=np.int64), kind="stable")
        matrix, front = matrix[order], _shuffled(order.astype("<u2").tobytes(), 2)
    body = (matrix.T if transform & T.TRANSPOSED else matrix).tobytes()
    return front + (_shuffled(body, _stride(stream)) if transform & T.SHUFFLED else body)


def unpack(raw: bytes, stream: Stream, rows: int, transform: int, label: str) -> bytes:
    """What `pack` was given. `raw` has the size that `raw_size` says. Raises IntegrityError where the rows' order is
    none."""
    split = 2 * rows if transform & T.ORDERED else 0
    front, body = raw[:split], raw[split:]
    if transform & T.SHUFFLED:
        body = _gathered(body, _stride(stream))
    if transform & T.TRANSPOSED:
        body = np.ascontiguousarray(np.frombuffer(body, _dtype(stream)).reshape(-1, rows).T).tobytes()
    if not split:
        return body
    order = np.frombuffer(_gathered(front, 2), "<u2")
    if (np.bincount(order, minlength=rows) != 1).any():
        raise IntegrityError(f"{label} has an order of rows that is none")
    matrix = _matrix(body, stream)
    back = np.empty_like(matrix)
    back[order] = matrix
    return back.tobytes()


def choose(data: bytes, stream: Stream, quality: int, codec: Codec) -> Transform:
    """The transform whose section is smallest, measured on a part of it: half of its rows by half of its columns, so
    that what transposing gains is not lost with the shape."""
    matrix = _matrix(data, stream)
    options: tuple[Transform, ...] = _OF_CODES if stream.kind == Kind.CODES else _OF_ITEMS
    if 1 in matrix.shape:
        options = tuple(option for option in options if not option & (T.TRANSPOSED | T.ORDERED))
    if len(matrix) > MAX_ORDERED:
        options = tuple(option for option in options if not option & T.ORDERED)
    while matrix.nbytes > SAMPLE_BYTES:
        rows, columns = matrix.shape
        matrix = matrix[: -(-rows // 2)] if rows >= columns else matrix[:, : -(-columns // 2)]
    part = Stream(stream.kind, matrix.shape[1], matrix.shape[0], ())
    sample = matrix.tobytes()
    sizes = {o: len(compress(pack(sample, part, o), min(quality, MEASURE_QUALITY), codec)) for o in options}
    return min(options, key=lambda option: sizes[option])


def _dtype(stream: Stream) -> str:
    return f"<u{ITEM_BYTES[stream.kind]}"


def _matrix(data: bytes, stream: Stream) -> Matrix:
    return np.frombuffer(data, _dtype(stream)).reshape(-1, stream.columns)


def _stride(stream: Stream) -> int:
    return max(ITEM_BYTES[stream.kind], _STRIDE)


def _shuffled(data: bytes, stride: int) -> bytes:
    return b"".join(data[first::stride] for first in range(stride))


def _gathered(data: bytes, stride: int) -> bytes:
    back, position = bytearray(len(data)), 0
    for first in range(stride):
        count = len(range(first, len(data), stride))
        back[first::stride] = data[position : position + count]
        position += count
    return bytes(back)
