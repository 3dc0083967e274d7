"""Reads and writes artifacts (`.specc`). An artifact is one file that stores a spec and the arrays of every parameter.

The file stores no code. The reader derives the names and shapes of all arrays from the spec. The file of a model with
int8 products also stores these names and shapes (table.py). The reader then compares the stored names and shapes with
the derived names and shapes. The reader verifies the digest of a section before it decompresses the section.
Decompression fails if a section is larger than the raw size that the header declares.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from specc.compiler.quant.artifact_sections import CHUNK_BYTES, ITEM_BYTES, TEXTS, Kind, Stream, kind_of, streams
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.artifact.sections import (
    MAX_SECTIONS,
    MAX_SPEC_BYTES,
    Header,
    Section,
    read_header,
    read_section,
    read_verified_bytes,
)
from specc.runtime.artifact.streams import Transform, choose, pack, raw_size, unpack
from specc.runtime.artifact.table import Array, Layout, Tensors
from specc.runtime.errors import IntegrityError, RunFailure, RuntimeFailure
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.data_digests import DataDigests

READ_LIMIT = 8 * 2**30
CACHED_SECTIONS = 256  # at most 220 MB; between trials of a bit allocation, most sections do not change


@dataclass(frozen=True, slots=True)
class SectionSize:
    """The total compressed and raw sizes in bytes of all sections of one kind. `pieces` is the number of these
    sections.
    """

    kind: str
    compressed: int
    raw: int
    pieces: int


@dataclass(frozen=True, slots=True)
class ArtifactSize:
    """The size of an artifact in bytes. `total` is the size of the file. `header` is the part of `total` before the
    first section.
    """

    total: int
    header: int
    sections: tuple[SectionSize, ...]


@dataclass(frozen=True, slots=True)
class ArtifactContents:
    """The uncompressed contents of an artifact. The contents were either read from a file and verified, or are to be
    written.

    Attributes:
        spec: the spec as canonical JSON.
        layout: the names, dtypes and shapes of the arrays, in file order.
        tensors: the arrays by parameter name and suffix; read-only after reading.
        interface: 32 bytes, the digest of parameter names, shapes and storage.
        code: 32 bytes, the digest of the code that the compiler generated when the file was written.
        table: the raw bytes of the table section (table.py); empty if there are no int8 products.
        trained_on: the digests of the training data; None if unknown.
    """

    spec: bytes
    layout: Layout
    tensors: Tensors
    interface: bytes = bytes(32)
    code: bytes = bytes(32)
    table: bytes = b""
    trained_on: DataDigests | None = None


def write_artifact(
    path: Path, contents: ArtifactContents, quality: int = 11, codec: Codec = Codec.BROTLI
) -> ArtifactSize:
    """Writes an artifact atomically: writes a temporary file, reads it back, verifies it, and renames it to `path`.

    The bytes of the file depend only on `contents`, `quality`, `codec` and the release of the compression library.

    Args:
        path: the file to write or to replace.
        contents: everything that the file stores.
        quality: the brotli quality, 0 to 11. Values below 11 are for tests.
        codec: the compression of all sections.

    Returns:
        The size of the file in bytes, by kind of section.

    Raises:
        RunFailure: if `contents.tensors` differs from `contents.layout`, or the contents exceed a limit of the format.
        IntegrityError: if the written file, when it is read back, has other contents.
        EnvironmentFailure: if the file cannot be written, or `codec` is brotli and brotli is not installed.
    """
    header, bodies = _assemble(contents, quality, codec)

    def check(temporary: Path) -> None:
        unreadable = IntegrityError(f"{path}: the file does not contain what was written", "check disk and memory")
        try:
            back = read_artifact(temporary, lambda _: (contents.interface, contents.layout), limit=2**62)
        except IntegrityError as error:
            raise unreadable from error
        arrays = (
            (back.tensors[name][stored.suffix], contents.tensors[name][stored.suffix])
            for name, stored in contents.layout
        )
        if replace(back, tensors={}) != replace(contents, tensors={}) or any(
            a.tobytes() != b.tobytes() for a, b in arrays
        ):
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
) -> ArtifactContents:
    """Reads the artifact at `path` and verifies every byte.

    Args:
        path: the artifact.
        layout_of: a function that maps the bytes of the spec to the expected interface digest and the expected layout.
        limit: the maximum total size of all arrays in bytes. The size is checked before any array is decompressed.
        judge: called with the text of the table of arrays before any array is decompressed. The text is empty if the
            file has no table. The function may raise IntegrityError to reject the file.

    Returns:
        The verified contents, with read-only arrays.

    Raises:
        IntegrityError: if the file is damaged, does not match `layout_of`, exceeds `limit`, or `judge` rejects it.
    """
    with _opened(path) as (file, size):
        header = read_header(file, size)
        spec = read_section(file, header.sections[0], "the spec", header.codec)
        try:
            interface, layout = layout_of(spec)
        except RuntimeFailure:
            raise
        except Exception as error:
            raise IntegrityError(f"the stored spec is not valid for this version of specc: {error}") from error
        if interface != header.interface:
            message = "the stored parameters differ from those that this version of specc derives from the stored spec"
            raise IntegrityError(message, "read the file with the version of specc that wrote it")
        if (needed := sum(stored.bytes for _, stored in layout)) > limit:
            raise IntegrityError(f"the arrays take {needed:,} bytes, more than the limit of {limit:,}")
        table, digests = (
            b"".join(read_section(file, section, label, header.codec) for section in header.of(kind))
            for kind, label in ((Kind.TABLE, "the table of arrays"), (Kind.DATA_DIGESTS, "the digests of data"))
        )
        if judge is not None:
            judge(table)
        tensors = _read_tensors(file, header, layout)
    trained_on = DataDigests.unpacked(digests) if digests else None
    return ArtifactContents(spec, layout, tensors, interface, header.code, table, trained_on)


def require_layout(path: Path, layout: Layout) -> None:
    """Raises IntegrityError if the section sizes of an artifact differ from the sizes in `layout`."""
    with _opened(path) as (file, size):
        _plan(read_header(file, size), layout)


def peek_spec(path: Path) -> bytes:
    """Returns the verified spec of the artifact at `path`, as canonical JSON. Reads no other section.

    Raises IntegrityError if the file cannot be read, or if the header or the spec is damaged.
    """
    with _opened(path) as (file, size):
        header = read_header(file, size)
        return read_section(file, header.sections[0], "the spec", header.codec)


def artifact_size(path: Path) -> ArtifactSize:
    """Verifies the digests of all sections of an artifact. Returns the size of the artifact by kind of section.

    Raises IntegrityError if the file cannot be read or is damaged.
    """
    with _opened(path) as (file, size):
        header = read_header(file, size)
        for i, section in enumerate(header.sections):
            read_verified_bytes(file, section, f"section {i}")
        return _size(header)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Yields the open file and its size in bytes. If the `with` block raises an IntegrityError, its message receives
    the path of the file.

    The file is not memory-mapped. If a mapped file is truncated, reading from it kills the process instead of raising
    an error.
    """
    try:
        # O_NONBLOCK prevents that opening a named pipe blocks.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise IntegrityError("not a regular file")
            yield file, status.st_size
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", error.hint) from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error


def _assemble(contents: ArtifactContents, quality: int, codec: Codec) -> tuple[Header, list[bytes]]:
    if len(contents.interface) != 32 or len(contents.code) != 32:
        raise ValueError("the interface and code digests are 32 bytes each")
    if len(contents.spec) > MAX_SPEC_BYTES:
        raise RunFailure(f"the resolved spec has {len(contents.spec):,} bytes; the maximum is {MAX_SPEC_BYTES:,}")
    _check(contents.layout, contents.tensors)
    raws = list(_raw_sections(contents))
    if len(raws) > MAX_SECTIONS:
        raise RunFailure(f"the parameters need {len(raws):,} sections; the maximum is {MAX_SECTIONS:,}")
    with ThreadPoolExecutor(min(os.cpu_count() or 1, len(raws))) as pool:
        sections = list(pool.map(lambda raw: _section(*raw, quality, codec), raws))
    header = Header(contents.interface, contents.code, tuple(section for section, _ in sections), codec)
    return header, [body for _, body in sections]


def _raw_sections(contents: ArtifactContents) -> Iterator[tuple[Kind, int, bytes]]:
    digests = b"" if contents.trained_on is None else contents.trained_on.packed()
    yield Kind.SPEC, 1, contents.spec
    yield from ((kind, 1, raw) for kind, raw in ((Kind.TABLE, contents.table), (Kind.DATA_DIGESTS, digests)) if raw)
    for stream in streams(contents.layout):
        arrays = (
            contents.tensors[name][stored.suffix] for name, stored in map(contents.layout.__getitem__, stream.members)
        )
        data, position = b"".join(array.tobytes() for array in arrays), 0
        for rows in stream.cuts():
            yield stream.kind, stream.columns, data[position : position + rows * stream.row_bytes]
            position += rows * stream.row_bytes


@lru_cache(CACHED_SECTIONS)
def _section(kind: Kind, columns: int, data: bytes, quality: int, codec: Codec) -> tuple[Section, bytes]:
    transform = Transform.PLAIN
    if kind not in TEXTS:
        stream = Stream(kind, columns, 0, ())
        transform = choose(data, stream, quality, codec)
        data = pack(data, stream, transform)
    body = compress(data, quality, codec)
    return Section(kind, len(body), len(data), hashlib.sha256(body).digest(), transform), body


def _plan(header: Header, layout: Layout) -> list[tuple[Stream, int]]:
    if header.version == 1:
        plan = list(_plan_1(layout))
    else:
        plan = [(stream, rows) for stream in streams(layout) for rows in stream.cuts()]
    if len(plan) != len(header.data) or any(
        (section.kind, section.raw) != (stream.kind, raw_size(stream, rows, section.transform))
        for (stream, rows), section in zip(plan, header.data, strict=True)
    ):
        raise IntegrityError("the sections do not have the sizes that the spec requires")
    return plan


def _plan_1(layout: Layout) -> Iterator[tuple[Stream, int]]:
    for kind in Kind:
        members = tuple(i for i, (_, stored) in enumerate(layout) if stored.bytes and kind_of(stored) == kind)
        items, step = sum(layout[i][1].bytes for i in members) // ITEM_BYTES[kind], CHUNK_BYTES // ITEM_BYTES[kind]
        stream = Stream(kind, 1, items, members)
        yield from ((stream, min(step, items - start)) for start in range(0, items, step))


def _check(layout: Layout, tensors: Tensors) -> None:
    expected = {(name, stored.suffix): stored for name, stored in layout}
    if len(expected) != len(layout):
        raise RunFailure("the layout names an array twice")
    arrays = {(name, suffix): array for name, by_suffix in tensors.items() for suffix, array in by_suffix.items()}
    if difference := sorted(arrays.keys() ^ expected.keys()):
        raise RunFailure(f"the arrays to write differ from the layout: {', '.join(difference[0])}")
    for key, stored in expected.items():
        array, dtype = arrays[key], stored.numpy_dtype()
        if array.shape != stored.shape or array.dtype != dtype:
            form, layout_form = f"{array.dtype}{list(array.shape)}", f"{dtype}{list(stored.shape)}"
            raise RunFailure(f"{', '.join(key)}: the array is {form}, but the layout states {layout_form}")


def _read_tensors(file: BinaryIO, header: Header, layout: Layout) -> dict[str, dict[str, Array]]:
    """Reads the array sections and returns the arrays of `layout`, by parameter name and suffix.

    In version 1 of the format, a stream of arrays is transformed before it is divided into sections. For version 1, the
    function therefore joins the sections before it inverts the transform.
    """
    pieces: dict[Stream, list[bytes]] = {}
    for i, ((stream, rows), section) in enumerate(zip(_plan(header, layout), header.data, strict=True), header.texts):
        raw = read_section(file, section, f"section {i}", header.codec)
        data = raw if header.version == 1 else unpack(raw, stream, rows, section.transform, f"section {i}")
        pieces.setdefault(stream, []).append(data)
    flat: dict[int, memoryview] = {}
    for stream, parts in pieces.items():
        data, position = b"".join(parts), 0
        if header.version == 1 and ITEM_BYTES[stream.kind] > 1:
            data = unpack(data, stream, stream.rows, Transform.SHUFFLED, stream.kind.name)
        for place in stream.members:
            size = layout[place][1].bytes
            flat[place], position = memoryview(data)[position : position + size], position + size
    tensors: dict[str, dict[str, Array]] = {}
    for place, (name, stored) in enumerate(layout):
        array = np.frombuffer(flat.get(place, b""), np.uint8).view(stored.numpy_dtype()).reshape(stored.shape)
        tensors.setdefault(name, {})[stored.suffix] = array
    return tensors


def _size(header: Header) -> ArtifactSize:
    sizes = tuple(
        SectionSize(kind.name.lower(), sum(s.compressed for s in sections), sum(s.raw for s in sections), len(sections))
        for kind in Kind
        if (sections := header.of(kind))
    )
    return ArtifactSize(header.total, header.size, sizes)
