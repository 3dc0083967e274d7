"""The `.specc` artifact: one file of the resolved spec and the arrays of every parameter, never code.

Names and shapes follow from the spec, which the reader's own compiler lowers; where arrays are multiplied as they are
stored, the file tells them too (table.py), and they have to agree.
Everything read is hashed before it is decompressed, and decompressed only up to what the header declares and
the spec expects.
"""

import contextlib
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from specc.compiler.quant.artifact_sections import ITEM_BYTES, Kind, Stream, kind_of, streams
from specc.compiler.quant.scheme import Stored
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.artifact.sections import (
    MAX_SECTIONS,
    MAX_SPEC_BYTES,
    Header,
    Section,
    raw_sizes,
    read_header,
    read_section,
    read_verified_bytes,
)
from specc.runtime.artifact.streams import choose, pack, raw_size, unpack
from specc.runtime.errors import IntegrityError, RunFailure, RuntimeFailure
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.data_digests import DataDigests

Array = npt.NDArray[Any]
Layout = Sequence[tuple[str, Stored]]
Tensors = Mapping[str, Mapping[str, Array]]

READ_LIMIT = 8 * 2**30
REMEMBERED = 256  # sections, about 90 MB: while bits are allocated, most stay as they were
_remembered: OrderedDict[tuple[object, ...], tuple[Section, bytes]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class SectionSize:
    """All sections of one kind: `compressed` and `raw` bytes, and the `pieces` that they are cut into."""

    kind: str
    compressed: int
    raw: int
    pieces: int


@dataclass(frozen=True, slots=True)
class ArtifactSize:
    """Where the bytes of an artifact go. `total`, the size of the file, is `header` plus the sections."""

    total: int
    header: int
    sections: tuple[SectionSize, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact.

    Attributes:
        spec: the resolved spec as canonical JSON.
        code: SHA-256 of the generated code that it was written with.
        tensors: arrays by parameter name and suffix, read-only, as `Stored` describes them.
        table: text of the table of arrays; empty where there is none.
        trained_on: digests of the training data; None where the file does not state them.
    """

    spec: bytes
    code: bytes
    tensors: Mapping[str, Mapping[str, Array]]
    table: bytes
    trained_on: DataDigests | None = None


@dataclass(frozen=True, slots=True)
class ArtifactContents:
    """The contents of an artifact before compression.

    Attributes:
        spec: the resolved spec, as canonical JSON.
        layout: the arrays, in file order.
        tensors: their values, by parameter name and suffix.
        interface: 32 bytes, the digest of parameter names, shapes and storage.
        code: 32 bytes, the digest of the generated code.
        table: the section of table.py; empty where no array is multiplied as it is stored.
        trained_on: digests of the training data; None where they are not known.
    """

    spec: bytes
    layout: Layout
    tensors: Tensors
    interface: bytes = bytes(32)
    code: bytes = bytes(32)
    table: bytes = b""
    trained_on: DataDigests | None = None

    @property
    def texts(self) -> list[tuple[Kind, bytes]]:
        """The sections in front of those of arrays, as (kind, raw bytes)."""
        digests = b"" if self.trained_on is None else self.trained_on.packed()
        optional = ((Kind.TABLE, self.table), (Kind.DATA_DIGESTS, digests))
        return [(Kind.SPEC, self.spec), *((kind, raw) for kind, raw in optional if raw)]


def write_artifact(
    path: Path, contents: ArtifactContents, quality: int = 11, codec: Codec = Codec.BROTLI
) -> ArtifactSize:
    """Writes `path` atomically. The file is read back and compared with `contents` before it takes its place.

    Args:
        path: the file to write or to replace.
        contents: everything that the file holds.
        quality: of brotli, 0 to 11; below 11 is for tests.
        codec: the compression of all sections.

    Returns:
        The bytes of the file, which are a function of `contents` and the release of the codec.

    Raises:
        RunFailure: `contents.tensors` differs from `contents.layout`, or the file cannot be written.
        IntegrityError: the file does not read back.
    """
    header, bodies = _assemble(contents, quality, codec)
    layout, tensors = contents.layout, contents.tensors

    def check(temporary: Path) -> None:
        unreadable = IntegrityError(f"{path}: what was written does not read back", "check disk and memory")
        try:
            back = read_artifact(temporary, lambda _: (contents.interface, layout), limit=2**62)
        except IntegrityError as error:
            raise unreadable from error
        same = all(
            back.tensors[name][stored.suffix].tobytes() == tensors[name][stored.suffix].tobytes()
            for name, stored in layout
        )
        texts = (back.spec, back.code, back.table, back.trained_on)
        if texts != (contents.spec, contents.code, contents.table, contents.trained_on) or not same:
            raise unreadable

    write_atomically(path, [header.pack(), *bodies], check)
    return _size(header)


def measured_bytes(contents: ArtifactContents, quality: int = 11, codec: Codec = Codec.BROTLI) -> int:
    """The exact size in bytes of the file that `write_artifact` would write, without writing it.

    `specc.runtime.artifact.quantized_model.entropy_bytes` is the quick estimate.
    """
    return _assemble(contents, quality, codec)[0].total


def read_artifact(
    path: Path,
    layout_of: Callable[[bytes], tuple[bytes, Layout]],
    *,
    limit: int = READ_LIMIT,
    judge: Callable[[bytes], None] | None = None,
) -> Artifact:
    """The artifact at `path`, every byte verified.

    `layout_of(spec)` gives the interface digest and the layout that the local compiler makes of the spec; `judge` is
    then shown the text of the table of arrays, empty where there is none, and may raise IntegrityError in words of its
    own. Raises IntegrityError for any damage, when layout or digest differ from the file, or when the arrays would take
    more than `limit` bytes.
    """
    with _opened(path) as (file, size):
        header = read_header(file, size)
        spec = read_section(file, header.sections[0], "the spec", header.codec)
        try:
            interface, layout = layout_of(spec)
        except RuntimeFailure:
            raise
        except Exception as error:
            raise IntegrityError(f"its spec is not one that this specc understands: {error}") from error
        if interface != header.interface:
            raise IntegrityError(
                "its parameters are not those that this specc makes of its spec",
                "read it with the version of specc that wrote it",
            )
        if (needed := sum(stored.bytes for _, stored in layout)) > limit:
            raise IntegrityError(f"its arrays take {needed:,} bytes, more than the limit of {limit:,}")
        table, digests = (
            b"".join(read_section(file, section, label, header.codec) for section in header.of(kind))
            for kind, label in ((Kind.TABLE, "the table of arrays"), (Kind.DATA_DIGESTS, "the digests of data"))
        )
        if judge is not None:
            judge(table)
        plan = _planned(header, layout)
        raws = [
            read_section(file, section, f"section {i}", header.codec)
            for i, section in enumerate(header.data, header.texts)
        ]
        tensors = _unpacked_1(layout, header, raws) if header.version == 1 else _unpacked(layout, header, plan, raws)
    return Artifact(spec, header.code, tensors, table, DataDigests.unpacked(digests) if digests else None)


def require_layout(path: Path, layout: Layout) -> None:
    """Raises IntegrityError unless the sections of the file at `path` have the sizes of this layout."""
    with _opened(path) as (file, size):
        _planned(read_header(file, size), layout)


def peek_spec(path: Path) -> bytes:
    """The resolved spec alone, verified; the other sections are not read. Raises IntegrityError."""
    with _opened(path) as (file, size):
        header = read_header(file, size)
        return read_section(file, header.sections[0], "the spec", header.codec)


def artifact_size(path: Path) -> ArtifactSize:
    """Where the bytes of the file at `path` go; all of them are verified. Raises IntegrityError."""
    with _opened(path) as (file, size):
        header = read_header(file, size)
        for i, section in enumerate(header.sections):
            read_verified_bytes(file, section, f"section {i}")
        return _size(header)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The file and its size; every IntegrityError raised inside gets the path in front.

    Read, not mapped: a file truncated while mapped kills the process instead of raising.
    """
    try:
        # Not blocking, so that a named pipe cannot hold us.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise IntegrityError("it is not a regular file")
            yield file, status.st_size
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", error.hint) from error
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read: {error.strerror}") from error


def _assemble(contents: ArtifactContents, quality: int, codec: Codec) -> tuple[Header, list[bytes]]:
    """The header and the compressed sections of an artifact."""
    if len(contents.interface) != 32 or len(contents.code) != 32:
        raise ValueError("the interface and code digests are 32 bytes each")
    if len(contents.spec) > MAX_SPEC_BYTES:
        raise RunFailure(f"the resolved spec has {len(contents.spec):,} bytes; an artifact holds {MAX_SPEC_BYTES:,}")
    _check(contents.layout, contents.tensors)
    parts: list[tuple[Stream | Kind, bytes]] = [*contents.texts, *_parts(contents.layout, contents.tensors)]
    if len(parts) > MAX_SECTIONS:
        raise RunFailure(f"the parameters need {len(parts):,} sections; an artifact holds {MAX_SECTIONS:,}")

    def section(item: tuple[Stream | Kind, bytes]) -> tuple[Section, bytes]:
        what, raw = item
        if isinstance(what, Stream):
            return _section(what, raw, quality, codec)
        body = compress(raw, quality, codec)
        return Section(what, len(body), len(raw), hashlib.sha256(body).digest()), body

    with ThreadPoolExecutor(min(os.cpu_count() or 1, len(parts))) as pool:
        made = list(pool.map(section, parts))
    sections = tuple(section for section, _ in made)
    return Header(contents.interface, contents.code, sections, codec), [body for _, body in made]


def _section(stream: Stream, data: bytes, quality: int, codec: Codec) -> tuple[Section, bytes]:
    """The section of whole rows of a stream, smallest as measured; made once of the same bytes."""
    key = (stream.kind, stream.columns, hashlib.sha256(data).digest(), quality, codec)
    made = _remembered.get(key)
    if made is None:
        transform = choose(data, stream, quality, codec)
        raw = pack(data, stream, transform)
        body = compress(raw, quality, codec)
        made = Section(stream.kind, len(body), len(raw), hashlib.sha256(body).digest(), transform), body
        _remembered[key] = made
        while len(_remembered) > REMEMBERED:
            with contextlib.suppress(KeyError):  # another thread was first
                _remembered.popitem(last=False)
    return made


def _parts(layout: Layout, tensors: Tensors) -> Iterator[tuple[Stream, bytes]]:
    """What each section holds: whole rows of a stream."""
    for stream in streams(layout):
        arrays = (tensors[name][stored.suffix] for name, stored in (layout[place] for place in stream.members))
        whole, position = b"".join(array.tobytes() for array in arrays), 0
        for rows in stream.cuts():
            yield stream, whole[position : position + rows * stream.row_bytes]
            position += rows * stream.row_bytes


def _planned(header: Header, layout: Layout) -> list[tuple[Stream, int]]:
    """The stream and the rows of every data section; none of version 1. Raises IntegrityError unless the sections are
    those of the layout."""
    data = header.data
    plan = [(stream, rows) for stream in streams(layout) for rows in stream.cuts()] if header.version > 1 else []
    if header.version == 1:
        wanted = raw_sizes(layout)
    else:
        wanted = [
            (stream.kind, raw_size(stream, rows, section.transform))
            for (stream, rows), section in zip(plan, data, strict=False)
        ] + [(Kind.SPEC, 0)] * abs(len(plan) - len(data))
    if [(section.kind, section.raw) for section in data] != wanted:
        raise IntegrityError("its sections do not have the sizes that its spec asks for")
    return plan


def _check(layout: Layout, tensors: Tensors) -> None:
    """Raises RunFailure unless `tensors` holds exactly the arrays of `layout`."""
    wanted = [(name, stored.suffix) for name, stored in layout]
    given = {(name, suffix) for name, arrays in tensors.items() for suffix in arrays}
    if len(set(wanted)) != len(wanted):
        raise RunFailure("the layout names an array twice")
    if given != set(wanted):
        odd = sorted(given ^ set(wanted))[0]
        raise RunFailure(f"the arrays to write differ from the layout: {odd[0]}, {odd[1]}")
    for name, stored in layout:
        array = tensors[name][stored.suffix]
        if array.shape != stored.shape or array.dtype != stored.numpy_dtype():
            raise RunFailure(
                f"{name}, {stored.suffix}: it is {array.dtype}{list(array.shape)}, and the layout says "
                f"{stored.numpy_dtype()}{list(stored.shape)}"
            )


def _unpacked(
    layout: Layout, header: Header, plan: list[tuple[Stream, int]], raws: list[bytes]
) -> dict[str, dict[str, Array]]:
    """The arrays of `layout`; the sections have exactly its sizes."""
    whole: dict[Stream, list[bytes]] = {}
    for i, ((stream, rows), section) in enumerate(zip(plan, header.data, strict=True)):
        label = f"section {header.texts + i}"
        whole.setdefault(stream, []).append(unpack(raws[i], stream, rows, section.transform, label))
        raws[i] = b""  # so that not all of them are held twice
    flat: dict[int, bytes | memoryview] = {}
    for stream, pieces in whole.items():
        data, position = memoryview(b"".join(pieces)), 0
        for place in stream.members:
            size = layout[place][1].bytes
            flat[place], position = data[position : position + size], position + size
    tensors: dict[str, dict[str, Array]] = {}
    for place, (name, stored) in enumerate(layout):
        array = np.frombuffer(flat.get(place, b""), np.uint8).view(stored.numpy_dtype()).reshape(stored.shape)
        tensors.setdefault(name, {})[stored.suffix] = array
    return tensors


def _unpacked_1(layout: Layout, header: Header, raws: list[bytes]) -> dict[str, dict[str, Array]]:
    """As `_unpacked`, of a file of version 1."""
    parts: dict[Kind, list[bytes]] = {}
    for section, raw in zip(header.data, raws, strict=True):
        parts.setdefault(section.kind, []).append(raw)
    joined = {kind: _from_planes(b"".join(found), ITEM_BYTES[kind]) for kind, found in parts.items()}
    position = dict.fromkeys(Kind, 0)
    tensors: dict[str, dict[str, Array]] = {}
    for name, stored in layout:
        kind = kind_of(stored)
        start, position[kind] = position[kind], position[kind] + stored.bytes
        flat = np.frombuffer(joined.get(kind, b""), dtype=np.uint8)[start : position[kind]]
        tensors.setdefault(name, {})[stored.suffix] = flat.view(stored.numpy_dtype()).reshape(stored.shape)
    return tensors


def _from_planes(data: bytes, item: int) -> bytes:
    return data if item == 1 else np.frombuffer(data, np.uint8).reshape(item, -1).T.tobytes()


def _size(header: Header) -> ArtifactSize:
    rows: list[SectionSize] = []
    for kind in Kind:
        if mine := [section for section in header.sections if section.kind == kind]:
            raw, compressed = sum(s.raw for s in mine), sum(s.compressed for s in mine)
            rows.append(SectionSize(kind.name.lower(), compressed, raw, len(mine)))
    return ArtifactSize(header.total, header.size, tuple(rows))
