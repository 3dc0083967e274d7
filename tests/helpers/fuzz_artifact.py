"""A process of test_damage.py: a fuzzer that follows the coverage of the readers of an artifact (atheris, libFuzzer).

usage: fuzz_artifact.py SECONDS CORPUS REPORT. It ends after SECONDS of its own processor time, or at the first input
that a reader neither reads nor refuses, with a code that is not 0. CORPUS has the inputs to begin with, and takes those
that reach new code. REPORT, a file, becomes one JSON object.
"""

import hashlib
import json
import os
import random
import re
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["specc.runtime.artifact", "specc.compiler.quant"]):
    from specc.compiler.quant.artifact_sections import Kind, streams
    from specc.compiler.quant.scheme import NUMPY_TYPES, Stored
    from specc.runtime.artifact.artifact import (
        ArtifactContents,
        artifact_size,
        peek_spec,
        read_artifact,
        require_layout,
        write_artifact,
    )
    from specc.runtime.artifact.codecs import Codec, compress, decompressed
    from specc.runtime.artifact.streams import Transform, pack, unpack
    from specc.runtime.artifact.table import entries, packed, require_values, unpacked
    from specc.runtime.artifact.table import require_layout as require_table

from export_samples import INTERFACE, SMALL, Layout, random_arrays, spec_of

from specc.runtime.errors import IntegrityError
from specc.runtime.storage.data_digests import DataDigests

PREFIX, ENTRY = struct.Struct("<8sHHI32s32s"), struct.Struct("<BBHII32s")
LIMIT, SECONDS = 2**24, 1.0  # bytes of all arrays, and processor time of one input
LARGEST = 2**14  # bytes of an input, before a section is expanded
MEMORY = 1024  # MiB of the process, which libFuzzer watches


def layout_of(spec: bytes) -> tuple[bytes, Layout]:
    """Stands for the compiler, which hands out layouts that make sense."""
    layout = []
    for name, suffix, dtype, shape in json.loads(spec)["arrays"]:
        if dtype not in NUMPY_TYPES or any(type(n) is not int or not 0 < n < 2**20 for n in shape) or len(shape) > 4:
            raise ValueError("no layout")
        layout.append((str(name), Stored(str(suffix), dtype, tuple(shape))))
    if len({(name, stored.suffix) for name, stored in layout}) != len(layout):
        raise ValueError("an array twice")
    return INTERFACE, layout


@dataclass
class Draft:
    """An artifact in parts: its prefix, the fields of its entries without digests, and its sections."""

    prefix: bytes
    entries: list[list[int]]
    bodies: list[bytes]

    @classmethod
    def of(cls, data: bytes) -> "Draft | None":
        """The parts of an artifact; None if its sizes are not those of its sections."""
        if len(data) < PREFIX.size or (count := struct.unpack_from("<I", data, 12)[0]) > 64:
            return None
        at = PREFIX.size + ENTRY.size * count + 32
        if len(data) < at:
            return None
        rows = [list(ENTRY.unpack_from(data, PREFIX.size + ENTRY.size * i)[:5]) for i in range(count)]
        bodies = []
        for row in rows:
            bodies.append(data[at : at + row[3]])
            at += row[3]
        return cls(data[: PREFIX.size], rows, bodies) if at == len(data) else None

    def data(self) -> bytes:
        """The artifact, with true digests."""
        rows = (
            ENTRY.pack(*row, hashlib.sha256(body).digest()) for row, body in zip(self.entries, self.bodies, strict=True)
        )
        head = self.prefix + b"".join(rows)
        return head + hashlib.sha256(head).digest() + b"".join(self.bodies)


def mutated(data: bytes, limit: int, seed: int) -> bytes:
    """One part of an artifact is changed by libFuzzer, and its digests are made true; or any bytes are changed."""
    rng = random.Random(seed)
    draft = Draft.of(data)
    if draft is None or not draft.bodies or rng.random() < 0.05:
        return bytes(atheris.Mutate(data, limit))
    which, part = rng.randrange(len(draft.bodies)), rng.choice(("prefix", "entry", "body", "raw", "raw", "order"))
    row = draft.entries[which]
    if part == "prefix":
        draft.prefix = bytes(atheris.Mutate(draft.prefix, PREFIX.size)).ljust(PREFIX.size, b"\0")
    elif part == "entry":
        fields = struct.pack("<BBHII", *row)
        row[:] = struct.unpack("<BBHII", bytes(atheris.Mutate(fields, len(fields))).ljust(len(fields), b"\0"))
    elif part == "order":
        other = rng.randrange(len(draft.bodies))
        move = rng.choice(("swap", "drop", "again"))
        if move == "swap":
            for rows in (draft.entries, draft.bodies):
                rows[which], rows[other] = rows[other], rows[which]  # type: ignore[index]
        elif move == "drop":
            del draft.entries[which], draft.bodies[which]
        else:
            draft.entries.insert(other, [*row])
            draft.bodies.insert(other, draft.bodies[which])
        draft.prefix = draft.prefix[:12] + struct.pack("<I", len(draft.bodies)) + draft.prefix[16:]
    elif part == "body":
        draft.bodies[which] = bytes(atheris.Mutate(draft.bodies[which], limit))
        row[3] = len(draft.bodies[which])
    else:
        codec = Codec.LZMA if draft.prefix[10] == 1 else Codec.BROTLI
        try:
            raw = b"".join(decompressed(draft.bodies[which], LARGEST, "it", codec))
        except IntegrityError:
            raw = draft.bodies[which]
        raw = raw + bytes(2**18) if rng.random() < 0.02 else bytes(atheris.Mutate(raw, LARGEST))
        draft.bodies[which] = compress(raw, 1, codec)
        row[3], row[4] = len(draft.bodies[which]), len(raw) if rng.random() < 0.9 else row[4]
    return draft.data()


class Target:
    """Reads an input by every reader, and counts what became of it."""

    def __init__(self, seconds: float, folder: Path, report: Path) -> None:
        self.seconds, self.report = seconds, report
        self.file, self.again = folder / "fuzzed", folder / "again"
        self.runs, self.accepted, self.slowest = 0, 0, 0.0
        self.messages = Counter[str]()

    def __call__(self, data: bytes) -> None:
        self.file.write_bytes(data)
        began = time.process_time()
        contents = self.read()
        spent = time.process_time() - began
        assert spent < SECONDS, f"it took {spent:.2f} s"
        self.runs, self.slowest = self.runs + 1, max(self.slowest, spent)
        if contents is not None:
            self.accepted += 1
            self.check(contents)
        if time.process_time() > self.seconds:
            self.end()

    def read(self) -> ArtifactContents | None:
        """The contents by `read_artifact`; the other readers must agree with it."""
        contents, layout = None, None
        for reader in (artifact_size, peek_spec):
            try:
                reader(self.file)
            except IntegrityError as error:
                self.refused(error)
        try:
            contents = read_artifact(self.file, layout_of, limit=LIMIT, judge=self.judge)
            layout = contents.layout
            if contents.table:
                table = unpacked(contents.table)
                require_table(table, layout)
                require_values(table, contents.tensors)
        except IntegrityError as error:
            self.refused(error)
        if layout is not None:
            artifact_size(self.file)
            require_layout(self.file, layout)
            assert contents is not None and peek_spec(self.file) == contents.spec
        return contents

    @staticmethod
    def judge(table: bytes) -> None:
        unpacked(table)

    def refused(self, error: IntegrityError) -> None:
        assert error.exit_code == 5
        path, _, rest = error.message.partition(": ")
        if path != str(self.file):  # the table names an array, by any text at all
            rest = "an array of the table"
        self.messages[re.sub(r"\d[\d,]*", "#", rest.partition(" of specc: ")[0])] += 1

    def check(self, contents: ArtifactContents) -> None:
        """Asserts that an artifact has the arrays of its layout, and can be written and read again."""
        sizes = {(name, s.suffix): (s.shape, s.numpy_dtype()) for name, s in contents.layout}
        arrays = {(name, suffix): a for name, by in contents.tensors.items() for suffix, a in by.items()}
        assert {key: (array.shape, array.dtype) for key, array in arrays.items()} == sizes
        if self.accepted % 50 == 1:  # every byte is compared there
            write_artifact(self.again, contents, quality=1)

    def end(self) -> None:
        answer = {
            "runs": self.runs,
            "accepted": self.accepted,
            "slowest": round(self.slowest, 3),
            "messages": dict(self.messages.most_common()),
        }
        self.report.write_text(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)


def write_corpus(folder: Path) -> None:
    """Artifacts of both codecs with all that a file may have, and with every transform."""
    folder.mkdir(parents=True, exist_ok=True)
    tall: Layout = [("t", Stored("codes", "i8", (40, 9))), ("t", Stored("scale", "f32", (40,)))]
    for number, (layout, codec) in enumerate((layout, codec) for layout in (SMALL, tall) for codec in Codec):
        tensors = random_arrays(layout, number)
        contents = ArtifactContents(
            spec=spec_of(layout),
            layout=layout,
            tensors=tensors,
            interface=INTERFACE,
            table=packed(entries(tensors).values()) if number % 2 else b"",
            trained_on=DataDigests.unpacked(bytes(range(64))) if number > 1 else None,
        )
        write_artifact(file := folder / f"seed_{number}", contents, quality=5, codec=codec)
        draft = Draft.of(file.read_bytes())
        assert draft is not None
        cuts = [(stream, rows) for stream in streams(layout) for rows in stream.cuts()]
        first = len(draft.bodies) - len(cuts)
        for transform in range(1, 2 * max(Transform)):
            for place, (stream, rows) in enumerate(cuts, first):
                body = b"".join(decompressed(draft.bodies[place], LARGEST, "it", codec))
                data = unpack(body, stream, rows, draft.entries[place][1], "it")
                used = transform if stream.kind == Kind.CODES else transform & ~Transform.ORDERED
                raw = pack(data, stream, Transform(used))
                draft.bodies[place] = compress(raw, 5, codec)
                draft.entries[place][1], draft.entries[place][3:] = used, [len(draft.bodies[place]), len(raw)]
            file.with_name(f"{file.name}_{transform}").write_bytes(draft.data())


def main(seconds: float, corpus: Path, report: Path) -> None:
    write_corpus(corpus)
    target = Target(seconds, report.parent, report)
    options = [f"-max_len={4 * LARGEST}", f"-rss_limit_mb={MEMORY}", "-timeout=60", "-print_final_stats=1"]
    artifacts = f"-artifact_prefix={report.parent}/"
    atheris.Setup([sys.argv[0], *options, artifacts, str(corpus)], target, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
