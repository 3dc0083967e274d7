"""The layout of an artifact's sections, derived from the arrays that a spec stores.

The runtime's `artifact` package defines the file format. Arrays whose names differ only in numbers have the same role,
such as the codes of all `blocks.*.mlp.up`. The arrays of one role are concatenated along rows into one stream. The
arrays of small roles share one stream per kind. A stream is divided between rows into sections.
"""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum

from specc.compiler.quant.scheme import Stored
from specc.compiler.records import record

CHUNK_BYTES = 512 * 2**10  # the largest size of a section, before compression
# Roles with fewer bytes share a stream, because each section needs a header entry and is compressed separately
JOIN_BYTES = 16 * 2**10
DATA_DIGEST_BYTES = 64  # the size in bytes of the section that holds the digests of the data
CODEC_BYTES = 16  # the bytes of brotli or LZMA2 block headers in a text section that does not compress
PREFIX_BYTES, ENTRY_BYTES, DIGEST_BYTES = (
    80,
    44,
    32,
)  # the sizes of the header's parts: its start, one entry per section, its digest


class Kind(IntEnum):
    """The content of a section. All arrays of one kind have the same item size."""

    SPEC = 0
    CODES = 1
    SCALES = 2
    F16 = 3
    BF16 = 4
    F32 = 5
    I32 = 6
    TABLE = 7
    DATA_DIGESTS = 8


ITEM_BYTES = dict.fromkeys(Kind, 1)
ITEM_BYTES |= {Kind.SCALES: 2, Kind.F16: 2, Kind.BF16: 2, Kind.F32: 4, Kind.I32: 4}
# These kinds have at most one section each; they precede all other kinds, in this order
TEXTS = (Kind.SPEC, Kind.TABLE, Kind.DATA_DIGESTS)


def kind_of(stored: Stored) -> Kind:
    """Returns the kind of an array. Row scales are a separate kind, because they compress worse in a section with other
    floats."""
    if stored.dtype == "i8":
        return Kind.CODES
    return Kind.SCALES if (stored.suffix, stored.dtype) == ("scale", "f16") else Kind[stored.dtype.upper()]


@record
class Stream:
    """The concatenation of the arrays `members`, as `rows` rows of `columns` items. `members` are the indices of the
    arrays in the layout of the artifact."""

    kind: Kind
    columns: int
    rows: int
    members: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.columns * ITEM_BYTES[self.kind]

    def cuts(self) -> Iterator[int]:
        """Yields the number of rows of each section. Sections have about equal sizes, of at most 512 KiB."""
        count = -(-self.rows // (CHUNK_BYTES // self.row_bytes))
        yield from (self.rows * (i + 1) // count - self.rows * i // count for i in range(count))


def streams(layout: Sequence[tuple[str, Stored]]) -> list[Stream]:
    """Returns the streams of an artifact, in file order. `layout` has a pair (parameter name, stored array) per array.
    Empty arrays are in no stream."""
    roles: dict[tuple[Kind, str, int], list[int]] = {}
    for place, (name, stored) in enumerate(layout):
        if stored.bytes:
            role = f"{re.sub(r'[.][0-9]+(?=[.]|$)', '.*', name)} {stored.suffix}"
            roles.setdefault((kind_of(stored), role, _columns(stored)), []).append(place)
    separate: list[Stream] = []
    joined: dict[Kind, list[int]] = {}
    for (kind, _, columns), members in roles.items():
        size = sum(layout[place][1].bytes for place in members)
        if size < JOIN_BYTES:
            joined.setdefault(kind, []).extend(members)
        else:
            separate.append(Stream(kind, columns, size // (columns * ITEM_BYTES[kind]), tuple(members)))
    for kind, members in joined.items():
        size = sum(layout[place][1].bytes for place in members)
        separate.append(Stream(kind, 1, size // ITEM_BYTES[kind], tuple(members)))
    return sorted(separate, key=lambda stream: stream.kind)


def overhead_bytes(layout: Sequence[tuple[str, Stored]], texts: Sequence[int]) -> int:
    """Returns an upper bound of an artifact's bytes without the compressed arrays.

    The size of the header is exact. The bound of a text section is its size before compression, plus CODEC_BYTES.

    Args:
        layout: A pair (parameter name, stored array) per array, in the order of `Scheme.stored`.
        texts: The bytes of each text section: the canonical JSON of the resolved spec, the table of arrays if the model
            has int8 products, and the 64 bytes of data digests.
    """
    sections = len(texts) + sum(1 for stream in streams(layout) for _ in stream.cuts())
    return PREFIX_BYTES + ENTRY_BYTES * sections + DIGEST_BYTES + sum(size + CODEC_BYTES for size in texts)


def _columns(stored: Stored) -> int:
    """Returns the number of columns with which an array is stored: the number of items per row. A row is the part of
    the array at one index of the first dim. Returns 1 for a scalar. Also returns 1 if a row is larger than CHUNK_BYTES,
    the largest size of a section, so that the row can be divided between sections."""
    item = ITEM_BYTES[kind_of(stored)]
    columns = stored.bytes // (stored.shape[0] * item) if stored.shape else 1
    return columns if columns * item <= CHUNK_BYTES else 1
