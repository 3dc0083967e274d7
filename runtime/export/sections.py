"""The parts of a `.specc` file: its header, and how arrays become compressed sections and come back.

Layout of version 1, little-endian:

    offset  bytes
    0       8     magic 93 53 50 45 43 43 0D 0A
    8       2     version, 1
    10      2     flags, 0
    12      4     number of sections, n
    16      32    interface digest
    48      32    code digest
    80      44 n  per section: kind (4), compressed size (4), raw size (4), SHA-256 of its compressed bytes
    80+44n  32    SHA-256 of everything above
    then          the sections, in order, and nothing after them

Sections come by kind: one of the spec, then the arrays of each kind joined in layout order and cut every 512
KiB. Names, dtypes and shapes are not stored. Kinds wider than a byte are stored by byte planes (all low bytes
first), which saves 3 to 9 % on trained floats. Cutting saves 0.3 % on codes against one stream, because
brotli then adapts to each part; it lets all cores compress; and it bounds what any one section can expand to.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

import brotli

from specc.compiler.quant.scheme import Stored
from specc.runtime.errors import IntegrityError

MAGIC = b"\x93SPECC\r\n"
VERSION = 1
MAX_SECTIONS = 2**16  # 32 GiB of raw data and a header of 2.9 MB
MAX_SPEC_BYTES = 16 * 2**20
CHUNK_BYTES = 512 * 2**10
SLACK_BYTES = 64 * 2**10  # a section is abandoned once it gives this much more than it declared
WINDOW_BITS = 24

_PREFIX = struct.Struct("<8sHHI32s32s")
_ENTRY = struct.Struct("<III32s")
_DIGEST_BYTES = 32


class Kind(IntEnum):
    """What a section holds. All arrays of one kind have one item size."""

    SPEC = 0
    CODES = 1
    SCALES = 2
    F16 = 3
    BF16 = 4
    F32 = 5
    I32 = 6


ITEM_BYTES = {Kind.SPEC: 1, Kind.CODES: 1, Kind.SCALES: 2, Kind.F16: 2, Kind.BF16: 2, Kind.F32: 4, Kind.I32: 4}


def kind_of(stored: Stored) -> Kind:
    """Where an array goes. Row scales keep to themselves: among other floats they compress worse."""
    if stored.dtype == "i8":
        return Kind.CODES
    if stored.dtype == "i32":
        return Kind.I32
    if stored.dtype == "f16":
        return Kind.SCALES if stored.suffix == "scale" else Kind.F16
    return Kind.BF16 if stored.dtype == "bf16" else Kind.F32


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the header's table. `digest` is the SHA-256 of the compressed bytes."""

    kind: Kind
    compressed: int
    raw: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A header that has been verified, or is to be written."""

    interface: bytes
    code: bytes
    sections: tuple[Section, ...]

    @property
    def size(self) -> int:
        """The header's own bytes."""
        return _PREFIX.size + _ENTRY.size * len(self.sections) + _DIGEST_BYTES

    @property
    def total(self) -> int:
        """The size of the whole file in bytes."""
        return self.size + sum(section.compressed for section in self.sections)

    def pack(self) -> bytes:
        """The header as it stands in the file."""
        prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(self.sections), self.interface, self.code)
        entries = (_ENTRY.pack(s.kind, s.compressed, s.raw, s.digest) for s in self.sections)
        body = prefix + b"".join(entries)
        return body + hashlib.sha256(body).digest()


def read_header(file: BinaryIO, size: int) -> Header:
    """The verified header of an artifact of `size` bytes: it is undamaged, and its sections fill the file.

    Leaves `file` at the first section. Raises IntegrityError.
    """
    prefix = file.read(_PREFIX.size)
    if prefix[: len(MAGIC)] != MAGIC:
        raise IntegrityError("it is not a .specc artifact: its first bytes are wrong")
    if len(prefix) < _PREFIX.size:
        raise IntegrityError("its header is cut off")
    _, version, flags, count, interface, code = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise IntegrityError(f"it has format version {version}, and this specc reads version {VERSION}")
    if flags != 0:
        raise IntegrityError("it sets flags that this version does not have")
    rest = _ENTRY.size * count + _DIGEST_BYTES
    # Before the read: a false count must not make us allocate.
    if not 1 <= count <= MAX_SECTIONS or len(prefix) + rest > size:
        raise IntegrityError(f"it declares {count:,} sections, which its {size:,} bytes cannot hold")
    table = file.read(rest)
    body = prefix + table[:-_DIGEST_BYTES]
    if len(table) != rest or hashlib.sha256(body).digest() != table[-_DIGEST_BYTES:]:
        raise IntegrityError("its header is damaged")
    sections: list[Section] = []
    for kind, compressed, raw, digest in _ENTRY.iter_unpack(table[:-_DIGEST_BYTES]):
        if kind not in ITEM_BYTES:
            raise IntegrityError(f"section {len(sections)} is of the unknown kind {kind}")
        if raw > (MAX_SPEC_BYTES if kind == Kind.SPEC else CHUNK_BYTES):
            raise IntegrityError(f"section {len(sections)} declares {raw:,} bytes, more than one may hold")
        sections.append(Section(Kind(kind), compressed, raw, digest))
    if [i for i, section in enumerate(sections) if section.kind == Kind.SPEC] != [0]:
        raise IntegrityError("its first section, and no other, must be the spec")
    header = Header(interface, code, tuple(sections))
    if header.total != size:
        raise IntegrityError(f"its sections end at byte {header.total:,}, and the file at {size:,}")
    return header


def raw_sizes(layout: Sequence[tuple[str, Stored]]) -> list[tuple[Kind, int]]:
    """The (kind, raw size) of every data section of an artifact of this layout, in file order."""
    totals = dict.fromkeys(list(Kind)[1:], 0)
    for _, stored in layout:
        totals[kind_of(stored)] += stored.bytes
    return [
        (kind, min(CHUNK_BYTES, total - start))
        for kind, total in totals.items()
        for start in range(0, total, CHUNK_BYTES)
    ]


def read_verified_bytes(file: BinaryIO, section: Section, label: str) -> bytes:
    """The compressed bytes of the section that `file` stands at. Raises IntegrityError."""
    compressed = file.read(section.compressed)
    if len(compressed) != section.compressed or hashlib.sha256(compressed).digest() != section.digest:
        raise IntegrityError(f"{label} is damaged")
    return compressed


def read_section(file: BinaryIO, section: Section, label: str) -> bytes:
    """The raw bytes of the section that `file` stands at; hashed before anything is decompressed.

    Raises IntegrityError.
    """
    compressed = read_verified_bytes(file, section, label)
    raw = b"".join(_decompressed(compressed, section.raw, label))
    if len(raw) != section.raw:
        raise IntegrityError(f"{label} holds {len(raw):,} bytes and declares {section.raw:,}")
    return raw


def _decompressed(compressed: bytes, declared: int, label: str) -> Iterator[bytes]:
    """Pieces of the raw bytes, little more than `declared` in all; the decoder's own limit is only a wish."""
    decoder = brotli.Decompressor()
    given, position = 0, 0
    try:
        while not decoder.is_finished():
            # After a full piece the decoder takes no input until it has been emptied; and when all input is
            # in, it may still hold output back.
            hungry = decoder.can_accept_more_data()
            step = compressed[position : position + SLACK_BYTES] if hungry else b""
            position += len(step)
            piece = decoder.process(step, output_buffer_limit=SLACK_BYTES // 2)
            if hungry and not (step or piece or decoder.is_finished()):
                raise IntegrityError(f"{label} ends before its compressed stream does")
            given += len(piece)
            if given > declared + SLACK_BYTES:
                raise IntegrityError(f"{label} expands past the {declared:,} bytes that it declares")
            yield piece
    except brotli.error as error:
        raise IntegrityError(f"{label} is not a brotli stream") from error
    if position != len(compressed):
        raise IntegrityError(f"{label} has bytes after its compressed stream")


def compress(raw: bytes, quality: int) -> bytes:
    """`raw` as brotli of `quality` 0 to 11 with a 16 MiB window."""
    return bytes(brotli.compress(raw, quality=quality, lgwin=WINDOW_BITS))
