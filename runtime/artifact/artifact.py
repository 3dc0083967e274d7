"""Reads and writes the `.specc` artifact: one file with the resolved spec and the arrays of every parameter.

The file stores no code. The reader's own compiler lowers the spec, and names and shapes follow from the result. If
arrays are multiplied in their stored form, the file also states their names and shapes (table.py), which must agree
with the spec. Every section is hashed before it is decompressed, and decompressed only up to the size that the header
declares and the spec expects.
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
REMEMBERED = 256  # cached sections, about 90 MB; most sections are unchanged between trials of a bit allocation
_remembered: OrderedDict[tuple[object, ...], tuple[Section, bytes]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class SectionSize:
    """The total `compressed` and `raw` bytes of all sections of one kind, and their number, `pieces`."""

    kind: str
    compressed: int
    raw: int
    pieces: int


@dataclass(frozen=True, slots=True)
class ArtifactSize:
    """The size of an artifact in bytes, by section. `total`, the size of the file, is `header` plus the sections."""

    total: int
    header: int
    sections: tuple[SectionSize, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact.

    Attributes:
        spec: the resolved spec as canonical JSON.
        code: the SHA-256 of the generated code at the time of writing.
        tensors: read-only arrays by parameter name and suffix, with the dtypes and shapes of `Stored`.
        table: the text of the table of arrays; empty if the file has none.
        trained_on: digests of the training data; None if the file does not state them.
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
        spec: the resolved spec as canonical JSON.
        layout: the names, dtypes and shapes of the arrays, in file order.
        tensors: the values of the arrays, by parameter name and suffix.
        interface: 32 bytes, the digest of parameter names, shapes and storage.
        code: 32 bytes, the digest of the generated code.
        table: the raw section of table.py; empty if no array is multiplied in its stored form.
        trained_on: digests of the training data; None if they are not known.
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
        """The sections that precede the array sections, as (kind, raw bytes)."""
        digests = b"" if self.trained_on is None else self.trained_on.packed()
        optional = ((Kind.TABLE, self.table), (Kind.DATA_DIGESTS, digests))
        return [(Kind.SPEC, self.spec), *((kind, raw) for kind, raw in optional if raw)]


def write_artifact(
    path: Path, contents: ArtifactContents, quality: int = 11, codec: Codec = Codec.BROTLI
) -> ArtifactSize:
    """Writes an artifact to `path` atomically: the temporary file is read back and verified before it is renamed.

    The bytes of the file depend on `contents`, `quality`, `codec` and the release of the codec's library alone.

    Args:
        path: the file to write or to replace.
        contents: everything that the file stores.
        quality: the brotli quality, 0 to 11. Values below 11 are for tests.
        codec: the compression of all sections.

    Returns:
        The size of the file in bytes, by section.

    Raises:
        RunFailure: `contents.tensors` differs from `contents.layout`, or the contents exceed a limit of the format.
        IntegrityError: the data read back differs from `contents`.
        EnvironmentFailure: the file cannot be written, or `codec` is brotli, which is not installed.
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
    """Returns the exact size in bytes of the file that `write_artifact` would write, without writing it.

    `specc.runtime.artifact.quantized_model.entropy_bytes` is a faster estimate.
    """
    return _assemble(contents, quality, codec)[0].total


def read_artifact(
    path: Path,
    layout_of: Callable[[bytes], tuple[bytes, Layout]],
    *,
    limit: int = READ_LIMIT,
    judge: Callable[[bytes], None] | None = None,
) -> Artifact:
    """Reads the artifact at `path` and verifies every byte.

    Args:
        path: the artifact.
        layout_of: returns the (interface digest, layout) that the local compiler derives from the bytes of the spec.
        limit: the maximum size of all arrays in bytes, checked before they are decompressed.
        judge: called with the text of the table of arrays, which is empty if the file has none, before any array is
            decompressed. It raises IntegrityError to reject the file.

    Returns:
        The verified artifact, with read-only arrays.

    Raises:
        IntegrityError: the file cannot be read or is damaged, its interface digest or section sizes differ from
            `layout_of`, its arrays need more than `limit` bytes, or `judge` rejects it.
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
    """Checks the section sizes of the artifact at `path`. Raises IntegrityError if they are not those of `layout`."""
    with _opened(path) as (file, size):
        _planned(read_header(file, size), layout)


def peek_spec(path: Path) -> bytes:
    """Reads and verifies the resolved spec of the artifact at `path`, without the other sections.

    Raises IntegrityError if the file cannot be read, or its header or spec is damaged.
    """
    with _opened(path) as (file, size):
        header = read_header(file, size)
        return read_section(file, header.sections[0], "the spec", header.codec)


def artifact_size(path: Path) -> ArtifactSize:
    """Returns the size of the artifact at `path` by section and verifies the digests of all sections.

    Raises IntegrityError if the file cannot be read or is damaged.
    """
    with _opened(path) as (file, size):
        header = read_header(file, size)
        for i, section in enumerate(header.sections):
            read_verified_bytes(file, section, f"section {i}")
        return _size(header)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Yields the open file and its size. An IntegrityError raised in the block is prefixed with the path.

    The file is not memory-mapped: if a mapped file is truncated, reading it kills the process instead of raising.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not block.
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
    """Returns the header and the compressed sections of an artifact."""
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
    """Returns the section of whole rows of a stream, with the transform of `choose`; cached by its raw bytes."""
    key = (stream.kind, stream.columns, hashlib.sha256(data).digest(), quality, codec)
    made = _remembered.get(key)
    if made is None:
        transform = choose(data, stream, quality, codec)
        raw = pack(data, stream, transform)
        body = compress(raw, quality, codec)
        made = Section(stream.kind, len(body), len(raw), hashlib.sha256(body).digest(), transform), body
        _remembered[key] = made
        while len(_remembered) > REMEMBERED:
            with contextlib.suppress(KeyError):  # another thread may have emptied the cache
                _remembered.popitem(last=False)
    return made


def _parts(layout: Layout, tensors: Tensors) -> Iterator[tuple[Stream, bytes]]:
    """Yields the (stream, bytes) of each array section, which holds whole rows of the stream."""
    for stream in streams(layout):
        arrays = (tensors[name][stored.suffix] for name, stored in (layout[place] for place in stream.members))
        whole, position = b"".join(array.tobytes() for array in arrays), 0
        for rows in stream.cuts():
            yield stream, whole[position : position + rows * stream.row_bytes]
            position += rows * stream.row_bytes


def _planned(header: Header, layout: Layout) -> list[tuple[Stream, int]]:
    """Returns the (stream, number of rows) of every array section; empty for format version 1.

    Raises IntegrityError if the kinds or raw sizes of the sections are not those of the layout.
    """
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
    """Raises RunFailure if the names, dtypes or shapes of `tensors` are not those of `layout`."""
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
    """Returns the arrays of `layout`. `_planned` has already checked the sizes of the sections."""
    whole: dict[Stream, list[bytes]] = {}
    for i, ((stream, rows), section) in enumerate(zip(plan, header.data, strict=True)):
        label = f"section {header.texts + i}"
        whole.setdefault(stream, []).append(unpack(raws[i], stream, rows, section.transform, label))
        raws[i] = b""  # frees the raw section, so that peak memory is not twice the arrays
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
    """Returns the arrays of `layout` from the sections of a file of format version 1."""
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
