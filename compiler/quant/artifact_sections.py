"""The sections of an artifact, as they follow from the arrays that a spec stores; the format is that of the runtime's
`artifact` package.

Arrays of one role, which have the same name but for numbers (`blocks.*.mlp.up`, codes), stand in one stream one below
the other, as the rows of one matrix; roles of few bytes share one stream per kind. A stream is cut between rows, each
part a section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from specc.compiler.quant.scheme import Stored

CHUNK_BYTES = 512 * 2**10  # of a section, before compression
JOIN_BYTES = 16 * 2**10  # roles below it share a stream: each section costs an entry, and brotli starts anew in it
DATA_DIGEST_BYTES = 64  # of the section of the data's digests
CODEC_BYTES = 16  # of a text section that does not compress: headers of brotli's or LZMA2's blocks
PREFIX_BYTES, ENTRY_BYTES, DIGEST_BYTES = 80, 44, 32  # of the header: its start, each section, its end


class Kind(IntEnum):
    """The contents of a section. All arrays of one kind have one item size."""

    SPEC = 0
    CODES = 1
    SCALES = 2
    F16 = 3
    BF16 = 4
    F32 = 5
    I32 = 6
    TABLE = 7
    DATA_DIGESTS = 8


ITEM_BYTES = {
    Kind.SPEC: 1,
    Kind.CODES: 1,
    Kind.SCALES: 2,
    Kind.F16: 2,
    Kind.BF16: 2,
    Kind.F32: 4,
    Kind.I32: 4,
    Kind.TABLE: 1,
    Kind.DATA_DIGESTS: 1,
}
TEXTS = (Kind.SPEC, Kind.TABLE, Kind.DATA_DIGESTS)  # at most one section each, in front, in this order


def kind_of(stored: Stored) -> Kind:
    """The kind of an array. Row scales keep to themselves: among other floats they compress worse."""
    if stored.dtype == "i8":
        return Kind.CODES
    if stored.dtype == "i32":
        return Kind.I32
    if stored.dtype == "f16":
        return Kind.SCALES if stored.suffix == "scale" else Kind.F16
    return Kind.BF16 if stored.dtype == "bf16" else Kind.F32


@dataclass(frozen=True, slots=True)
class Stream:
    """`rows` of `columns` items each, of the arrays `members` (places in the layout), one after the other."""

    kind: Kind
    columns: int
    rows: int
    members: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.columns * ITEM_BYTES[self.kind]

    def cuts(self) -> Iterator[int]:
        """The rows of each of its sections: about as many each, and at most 512 KiB."""
        count = -(-self.rows // (CHUNK_BYTES // self.row_bytes))
        yield from (self.rows * (i + 1) // count - self.rows * i // count for i in range(count))


def streams(layout: Sequence[tuple[str, Stored]]) -> list[Stream]:
    """The streams of an artifact of this layout, in file order; arrays of no bytes are in none."""
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
    """The bytes of an artifact besides its compressed arrays, at most.

    The header is exact. Each text section counts with its bytes before compression, which a codec exceeds by a few
    bytes at most.

    Args:
        layout: the stored arrays, as `Scheme.stored` gives them, in order.
        texts: the bytes of each text section: the resolved spec's canonical JSON, the table of arrays of int8 products
            where there are any, and the 64 bytes of the data's digests.
    """
    sections = len(texts) + sum(1 for stream in streams(layout) for _ in stream.cuts())
    return PREFIX_BYTES + ENTRY_BYTES * sections + DIGEST_BYTES + sum(size + CODEC_BYTES for size in texts)


def _columns(stored: Stored) -> int:
    """Items of a row; a row too long for a section counts as many of one item."""
    item = ITEM_BYTES[kind_of(stored)]
    columns = stored.bytes // (stored.shape[0] * item) if stored.shape else 1
    return columns if columns * item <= CHUNK_BYTES else 1
