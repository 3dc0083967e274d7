"""The header and the sections of an artifact (`.specc`).

Layout of version 2, little-endian:

    offset  bytes
    0       8     magic 93 53 50 45 43 43 0D 0A
    8       2     version, 2
    10      2     codec of all sections: 0 brotli, 1 LZMA2
    12      4     number of sections, n
    16      32    interface digest
    48      32    code digest
    80      44 n  per section: kind (1 byte), transform (1), zero (2), compressed size (4), raw size (4), SHA-256
        of the compressed bytes (32)
    80+44n  32    SHA-256 of everything above
    then          the sections, in order, and nothing after them

The sections are, in this order:

- the spec;
- the table of arrays (table.py), if there are int8 products;
- the digests of the training data, if they are known: 64 bytes, the SHA-256 of the training and validation splits;
- the streams (streams.py). Each stream is divided between rows into sections of at most 512 KiB.

The writer measures the compressed size of each stream section under several transforms, and selects the transform with
the smallest size. Only the table of arrays stores names, dtypes and shapes. Streams are divided into sections so that
all cores can compress in parallel, and so that every section is small.

The writer always writes version 2. The reader also accepts version 1, which has no codec and no transforms. In version
1, the arrays of each kind are joined in layout order and divided every 512 KiB. Items of several bytes are stored as
byte planes: first the low bytes of all items, then the next bytes of all items, and so on.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import BinaryIO

from specc.compiler.quant.artifact_sections import CHUNK_BYTES, DATA_DIGEST_BYTES, DIGEST_BYTES, ITEM_BYTES, TEXTS, Kind
from specc.runtime.artifact.codecs import Codec, decompressed
from specc.runtime.errors import IntegrityError

MAGIC = b"\x93SPECC\r\n"
VERSION = 2
MAX_SECTIONS = 2**16  # this number of sections has 32 GiB of raw data and a header of 2.9 MB
MAX_SPEC_BYTES = 16 * 2**20
ORDER_BYTES = 2 * 2**16  # the maximum size of the row indices that precede the data of an ORDERED section

_PREFIX = struct.Struct("<8sHHI32s32s")
_ENTRY = struct.Struct("<BBHII32s")  # in version 1, the kind has four bytes, of which the last three are 0


@dataclass(frozen=True, slots=True)
class Section:
    """The header entry of one section.

    Attributes:
        kind: the kind of the section.
        compressed: the compressed size in bytes.
        raw: the raw size in bytes.
        digest: the SHA-256 of the compressed bytes.
        transform: the transform of the section, as flags of `streams.Transform`.
    """

    kind: Kind
    compressed: int
    raw: int
    digest: bytes
    transform: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an artifact. The header was either read from a file and verified, or is to be written."""

    interface: bytes
    code: bytes
    sections: tuple[Section, ...]
    codec: Codec = Codec.BROTLI
    version: int = VERSION

    @property
    def texts(self) -> int:
        """The number of sections before the array sections."""
        return sum(section.kind in TEXTS for section in self.sections)

    def of(self, kind: Kind) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.kind == kind)

    @property
    def data(self) -> tuple[Section, ...]:
        """The array sections, in file order."""
        return self.sections[self.texts :]

    @property
    def size(self) -> int:
        return _PREFIX.size + _ENTRY.size * len(self.sections) + DIGEST_BYTES

    @property
    def total(self) -> int:
        """The size of the whole file in bytes."""
        return self.size + sum(section.compressed for section in self.sections)

    def pack(self) -> bytes:
        prefix = _PREFIX.pack(MAGIC, VERSION, self.codec, len(self.sections), self.interface, self.code)
        entries = (_ENTRY.pack(s.kind, s.transform, 0, s.compressed, s.raw, s.digest) for s in self.sections)
        body = prefix + b"".join(entries)
        return body + hashlib.sha256(body).digest()


def read_header(file: BinaryIO, size: int) -> Header:
    """Reads and verifies the header of an artifact. After the call, `file` is positioned at the first section.

    `size` is the size of the file in bytes. Raises IntegrityError if the header is damaged or not supported, or if the
    sections do not exactly fill the file.
    """
    prefix = file.read(_PREFIX.size)
    if prefix[: len(MAGIC)] != MAGIC:
        raise IntegrityError("not a .specc artifact: the first bytes are wrong")
    if len(prefix) < _PREFIX.size:
        raise IntegrityError("the header is truncated")
    _, version, codec, count, interface, code = _PREFIX.unpack(prefix)
    if version not in (1, VERSION):
        raise IntegrityError(f"the format version is {version}; this version of specc reads 1 and {VERSION}")
    if codec not in ((0,) if version == 1 else tuple(Codec)):
        raise IntegrityError(f"the codec is {codec}, which version {version} does not have")
    rest = _ENTRY.size * count + DIGEST_BYTES
    # Check the count before reading. A wrong count could otherwise cause a large allocation.
    if not 1 <= count <= MAX_SECTIONS or len(prefix) + rest > size:
        raise IntegrityError(f"the header declares {count:,} sections, too many for {size:,} bytes")
    table = file.read(rest)
    body = prefix + table[:-DIGEST_BYTES]
    if len(table) != rest or hashlib.sha256(body).digest() != table[-DIGEST_BYTES:]:
        raise IntegrityError("the header is damaged")
    sections: list[Section] = []
    for kind, transform, zero, compressed, raw, digest in _ENTRY.iter_unpack(table[:-DIGEST_BYTES]):
        if kind not in ITEM_BYTES:
            raise IntegrityError(f"section {len(sections)} has the unknown kind {kind}")
        if zero or (transform and (version == 1 or kind in TEXTS)):
            raise IntegrityError(f"section {len(sections)} sets reserved bits")
        if raw > (largest := MAX_SPEC_BYTES if kind in TEXTS else CHUNK_BYTES + ORDER_BYTES):
            raise IntegrityError(f"section {len(sections)} declares {raw:,} bytes; the maximum is {largest:,}")
        sections.append(Section(Kind(kind), compressed, raw, digest, transform))
    if [i for i, section in enumerate(sections) if section.kind == Kind.SPEC] != [0]:
        raise IntegrityError("the first section must be the spec, and no other section may be a spec")
    texts = [section.kind for section in sections if section.kind in TEXTS]
    if texts != sorted(set(texts), key=TEXTS.index) or [section.kind for section in sections[: len(texts)]] != texts:
        message = "the table of arrays and the digests of data must follow the spec, in this order, at most once each"
        raise IntegrityError(message)
    if version == 1 and len(texts) > 1:
        raise IntegrityError("a file of version 1 has no table of arrays and no digests of data")
    if any(section.kind == Kind.DATA_DIGESTS and section.raw != DATA_DIGEST_BYTES for section in sections):
        raise IntegrityError(f"the digests of training data do not have {DATA_DIGEST_BYTES} bytes")
    header = Header(interface, code, tuple(sections), Codec(codec), version)
    if header.total != size:
        raise IntegrityError(f"the sections end at byte {header.total:,}, but the file ends at byte {size:,}")
    return header


def read_verified_bytes(file: BinaryIO, section: Section, label: str) -> bytes:
    """Reads the compressed bytes of a section at the current position of `file`.

    `label` is the name of the section in error messages. Raises IntegrityError if the bytes do not match the digest of
    the section.
    """
    compressed = file.read(section.compressed)
    if len(compressed) != section.compressed or hashlib.sha256(compressed).digest() != section.digest:
        raise IntegrityError(f"{label} is damaged")
    return compressed


def read_section(file: BinaryIO, section: Section, label: str, codec: Codec) -> bytes:
    """Reads a section at the current position of `file`, verifies its digest, and decompresses it.

    Args:
        file: the artifact, positioned at the section.
        section: the header entry of the section.
        label: the name of the section, for error messages.
        codec: the compression method of the file.

    Returns:
        The raw bytes of the section.

    Raises:
        IntegrityError: if the section is damaged, is not a valid stream, or does not have the declared raw size.
        EnvironmentFailure: if `codec` is brotli, and brotli is not installed.
    """
    compressed = read_verified_bytes(file, section, label)
    raw = b"".join(decompressed(compressed, section.raw, label, codec))
    if len(raw) != section.raw:
        raise IntegrityError(f"{label} has {len(raw):,} bytes, but the header declares {section.raw:,}")
    return raw
