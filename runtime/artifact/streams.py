"""Reversible transforms of the rows of a section, which reduce its compressed size.

A stream is the concatenation of arrays with equal item size and equal row length. The file stores the transform of each
section. It does not store the boundaries between sections, which `specc.compiler.quant.artifact_sections` derives from
the layout.
"""

from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.compiler.quant.artifact_sections import ITEM_BYTES, Kind, Stream
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.errors import IntegrityError

Matrix = npt.NDArray[Any]

SAMPLE_BYTES = 128 * 2**10
# Compression with this quality takes half the time of quality 11, and ranks transforms in the same order. Qualities up
# to 9 rank transforms differently.
MEASURE_QUALITY = 10
MAX_ORDERED = 2**16  # the maximum number of rows, because row indices are u16
_STRIDE = 2  # the stride of SHUFFLED for one-byte codes


class Transform(IntFlag):
    """Transforms of the rows of a section. Several flags apply in the order ORDERED, TRANSPOSED, SHUFFLED.

    - PLAIN: the rows in their original order.
    - ORDERED: the original index of every row (u16), followed by the rows in order of mean magnitude.
    - TRANSPOSED: the items column by column.
    - SHUFFLED: the first bytes of all items, then the second bytes of all items, and so on. For items of one byte: all
      bytes with an even index, then all bytes with an odd index.
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
    """Returns the size in bytes of a section of `rows` rows before compression.

    Raises IntegrityError if `transform` has unknown flags, or is not allowed for this stream and this number of rows.
    """
    if transform & ~KNOWN:
        raise IntegrityError(f"a section has the unknown transform {transform}")
    ordered = bool(transform & T.ORDERED)
    if ordered and (rows > MAX_ORDERED or stream.kind != Kind.CODES):
        raise IntegrityError(
            f"a section with {rows:,} rows of {stream.kind.name.lower()} cannot have the transform ORDERED"
        )
    return rows * stream.row_bytes + (2 * rows if ordered else 0)


def pack(data: bytes, stream: Stream, transform: int) -> bytes:
    """Applies `transform` to `data`, the bytes of whole rows of `stream`. Returns the bytes of the section before
    compression.
    """
    matrix = _matrix(data, stream)
    front = b""
    if transform & T.ORDERED:
        order = np.argsort(np.abs(matrix.view(np.int8).astype(np.int16)).sum(1, dtype=np.int64), kind="stable")
        matrix, front = matrix[order], _shuffled(order.astype("<u2").tobytes(), 2)
    body = (matrix.T if transform & T.TRANSPOSED else matrix).tobytes()
    return front + (_shuffled(body, _stride(stream)) if transform & T.SHUFFLED else body)


def unpack(raw: bytes, stream: Stream, rows: int, transform: int, label: str) -> bytes:
    """Inverts `pack`: returns the rows of a section.

    Args:
        raw: the bytes of the section before compression, of the size that `raw_size` returns.
        stream: the stream of the section.
        rows: the number of rows.
        transform: the flags of `Transform`.
        label: the name of the section, for error messages.

    Returns:
        The rows in their original order, as bytes.

    Raises:
        IntegrityError: if the stored row order is not a permutation.
    """
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
        raise IntegrityError(f"the row order of {label} is not a permutation")
    matrix = _matrix(body, stream)
    back = np.empty_like(matrix)
    back[order] = matrix
    return back.tobytes()


def choose(data: bytes, stream: Stream, quality: int, codec: Codec) -> Transform:
    """Selects the transform of a section. The function compresses a sample with each allowed transform, and returns the
    transform with the smallest compressed size.

    The sample is a submatrix of the rows. Its larger dimension is halved until the sample has at most `SAMPLE_BYTES`.

    Args:
        data: whole rows of `stream`.
        stream: the stream of the section.
        quality: the brotli quality of the artifact, 0 to 11. The samples are compressed with at most `MEASURE_QUALITY`.
        codec: the compression method of the artifact.

    Returns:
        The transform.
    """
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
