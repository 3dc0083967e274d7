"""Artifacts that are damaged, forged or hostile: refused before anything is handed out."""

import json
import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import brotli
import numpy as np
import pytest
from artifact_damage import forge, in_process, mutated, parts_of
from export_samples import SMALL, Layout, assert_same, layout_of, spec_of, write
from tiers import Trials, tiers

from specc.compiler.quant.scheme import Stored
from specc.runtime.artifact import sections
from specc.runtime.artifact.artifact import artifact_size, peek_spec, read_artifact
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.errors import IntegrityError


def assert_refused(path: Path, data: bytes) -> str:
    """Every reader raises IntegrityError, with the path; returns the message."""
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as raised:
        read_artifact(path, layout_of)
    assert raised.value.message.startswith(str(path)) and raised.value.exit_code == 5
    return raised.value.message.removeprefix(f"{path}: ")


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "m")
    good = (tmp_path / "m").read_bytes()
    positions = random.Random(0).sample(range(8 * len(good)), 1000)
    for position in [*range(8 * 80), *positions]:
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        assert_refused(tmp_path / "bad", bytes(bad))


def test_a_missing_file_and_every_changed_length_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        read_artifact(tmp_path / "m", layout_of)
    write(tmp_path / "m")
    good = (tmp_path / "m").read_bytes()
    rng = random.Random(1)
    cuts = {*range(120), *range(len(good) - 30, len(good)), *rng.choices(range(len(good)), k=100)}
    for length in cuts:
        assert_refused(tmp_path / "bad", good[:length])
    for extra in (b"\0", b"\n", b"x" * 1000, good, *(rng.randbytes(rng.randint(1, 99)) for _ in range(50))):
        assert_refused(tmp_path / "bad", good + extra)
        assert_refused(tmp_path / "bad", extra + good)
        at = rng.randrange(len(good))
        assert_refused(tmp_path / "bad", good[:at] + extra + good[at:])


def test_splices_and_swaps_are_noticed(tmp_path: Path) -> None:
    layout: Layout = [*SMALL, ("e", Stored("codes", "i8", (3 * sections.CHUNK_BYTES,)))]
    write(tmp_path / "a", layout, 0, note="a")
    write(tmp_path / "b", layout, 1, note="b")
    first, second = (parts_of((tmp_path / name).read_bytes()) for name in "ab")
    assert len(first) == len(second)
    rng = random.Random(2)
    tried = 0
    while tried < 200:
        mixed = list(first)
        if rng.random() < 0.5:
            for i in rng.sample(range(len(first)), rng.randint(1, 3)):
                mixed[i] = second[i]
        else:
            i, j = rng.sample(range(len(first)), 2)
            mixed[i], mixed[j] = mixed[j], mixed[i]
        if b"".join(mixed) not in (b"".join(first), b"".join(second)):
            assert_refused(tmp_path / "bad", b"".join(mixed))
            tried += 1


# ---- files that are whole, and lie


def forged_model(codes: bytes, declared: int, shape: list[int], **fields: Any) -> bytes:
    """`kind` is the entry's first four bytes: of version 2 the kind, the transform and two zeros."""
    spec = spec_of([("a", Stored("codes", "i8", tuple(shape)))])
    head = compress(spec, 5, Codec(fields["flags"])) if fields.get("flags") == 1 else brotli.compress(spec)
    return forge([(0, head, len(spec)), (fields.pop("kind", 1), codes, declared)], **fields)


def test_a_forged_file_that_tells_the_truth_is_read(tmp_path: Path) -> None:
    for version in (1, 2):
        (tmp_path / "m").write_bytes(forged_model(brotli.compress(b"\1" * 12), 12, [3, 4], version=version))
        codes = read_artifact(tmp_path / "m", layout_of).tensors["a"]["codes"]
        assert np.array_equal(codes, np.ones((3, 4), np.int8))
    lzma = compress(b"\1" * 12, 11, Codec.LZMA)
    (tmp_path / "m").write_bytes(forged_model(lzma, 12, [3, 4], version=2, flags=1))
    assert np.array_equal(read_artifact(tmp_path / "m", layout_of).tensors["a"]["codes"], codes)


def test_lies_are_named(tmp_path: Path) -> None:
    codes = brotli.compress(b"\1" * 12)
    spec = brotli.compress(b"{}")
    big = 700 * 1024
    for data, message in [
        (b"", "first bytes are wrong"),
        (b"\x93SPECC\r\n", "header is truncated"),
        (b"PK\3\4" + b"\0" * 200, "first bytes are wrong"),
        (forged_model(codes, 12, [3, 4], version=3), "format version is 3"),
        (forged_model(codes, 12, [3, 4], flags=1), "the codec is 1"),
        (forged_model(codes, 12, [3, 4], version=2, flags=2), "the codec is 2"),
        (forged_model(codes, 12, [3, 4], version=2, flags=1), "not a valid lzma stream"),
        (forged_model(codes, 12, [3, 4], kind=1 | 8 << 8, version=2), "unknown transform 8"),
        (forged_model(codes, 12, [3, 4], kind=1 | 1 << 8), "sets reserved bits"),
        (forged_model(codes, 12, [3, 4], kind=1 | 1 << 16, version=2), "sets reserved bits"),
        (forged_model(codes, 12, [3, 4], kind=1 | 4 << 8, version=2), "sizes that the spec requires"),
        (
            forged_model(brotli.compress(b"\1" * 36), 36, [3, 4], kind=1 | 4 << 8, version=2),
            "row order of section 1 is not a permutation",
        ),
        (forged_model(codes, 12, [12], kind=1 | 4 << 8, version=2), "sizes that the spec requires"),
        (
            forged_model(brotli.compress(bytes(2**17)), 2**17, [2**17, 1], kind=1 | 4 << 8, version=2),
            "cannot have the transform ORDERED",
        ),
        (forged_model(codes, 12, [3, 4], count=2**32 - 1), "4,294,967,295 sections"),
        (forged_model(codes, 12, [3, 4], count=0), "0 sections"),
        (forged_model(codes, 12, [3, 4], count=1), "header is damaged"),
        (forged_model(codes, 12, [3, 4], interface=bytes(32)), "differ from those that this version of specc derives"),
        (forged_model(codes, 12, [3, 4], compressed=2**32 - 1), "the sections end at byte"),
        (forged_model(codes, 12, [3, 5]), "sizes that the spec requires"),
        (forged_model(codes, 11, [1, 11]), "has 12 bytes, but the header declares 11"),
        (forged_model(codes, 13, [13]), "has 12 bytes, but the header declares 13"),
        (forged_model(codes + b"\0", 12, [3, 4]), "section 1"),
        (forged_model(codes * 2, 12, [3, 4]), "section 1"),
        (forged_model(codes[:-1], 12, [3, 4]), "section 1"),
        (forged_model(b"", 12, [3, 4]), "is truncated"),
        (forged_model(b"\xff" * 40, 12, [3, 4]), "not a valid brotli stream"),
        (forged_model(brotli.compress(bytes(big)), big, [big]), "the maximum is"),
        (forged_model(codes, 12, [2**40, 2**20]), "more than the limit"),
        (forged_model(codes, 12, [3]), "sizes that the spec requires"),
        (forge([(1, codes, 12), (0, spec, 2)]), "first section must be the spec"),
        (forge([(1, codes, 12)]), "first section must be the spec"),
        (forge([(0, spec, 2), (0, spec, 2)]), "first section must be the spec"),
        (forge([(0, spec, 2), (9, codes, 12)]), "unknown kind 9"),
        (forge([(0, spec, 2), (7, codes, 12)]), "version 1 has no table"),
        (forge([(0, spec, 2), (8, codes, 64)]), "version 1 has no table"),
        (forge([(0, spec, 2), (1, codes, 12), (7, codes, 12)], version=2), "must follow the spec, in this order"),
        (forge([(0, spec, 2), (7, codes, 12), (7, codes, 12)], version=2), "must follow the spec, in this order"),
        (forge([(0, spec, 2), (8, codes, 64), (7, codes, 12)], version=2), "must follow the spec, in this order"),
        (forge([(0, spec, 2), (8, codes, 12)], version=2), "digests of training data do not have 64 bytes"),
        (forge([(0, spec, 2), (7 | 1 << 8, codes, 12)], version=2), "sets reserved bits"),
        (forge([(0 | 1 << 8, spec, 2)], version=2), "sets reserved bits"),
        (forge([(0, spec, 2)]), "not valid for this version of specc"),
        (forge([(0, brotli.compress(b"\xff\xfe"), 2)]), "not valid for this version of specc"),
        (forge([(0, spec, 2**24 + 1)]), "the maximum is"),
    ]:
        assert message in assert_refused(tmp_path / "bad", data)


def test_extra_or_reordered_sections_are_refused(tmp_path: Path) -> None:
    """There is no room in which a file could bring along anything that its spec does not ask for."""
    layout: Layout = [("a", Stored("codes", "i8", (4,))), ("a", Stored("scale", "f16", (2,)))]
    spec, four = spec_of(layout), brotli.compress(b"\1\2\3\4")
    head = (0, brotli.compress(spec), len(spec))
    (tmp_path / "good").write_bytes(forge([head, (1, four, 4), (2, four, 4)]))
    assert read_artifact(tmp_path / "good", layout_of).tensors["a"]["scale"].tobytes() == b"\1\3\2\4"
    empty = (1, brotli.compress(b""), 0)
    for entries in (
        [head, (2, four, 4), (1, four, 4)],
        [head, (1, four, 4), (2, four, 4), (2, four, 4)],
        [head, (1, four, 4), (2, four, 4), (5, four, 4)],
        [head, empty, (1, four, 4), (2, four, 4)],
        [head, (1, brotli.compress(b"\1\2"), 2), (1, brotli.compress(b"\3\4"), 2), (2, four, 4)],
        [head, (1, four, 4)],
        [head],
    ):
        assert "sizes that the spec requires" in assert_refused(tmp_path / "bad", forge(entries))


def test_mutated_headers_with_true_digests_never_crash(tmp_path: Path) -> None:
    """Each is refused, or says the same as the original: the code digest is only reported."""
    tensors = write(tmp_path / "m")
    good = (tmp_path / "m").read_bytes()
    end = sum(len(part) for part in parts_of(good)[: 1 + struct.unpack_from("<I", good, 12)[0]])
    rng = random.Random(3)
    accepted = 0
    for _ in range(3000):
        body = mutated(good, rng)
        (tmp_path / "bad").write_bytes(body)
        try:
            artifact = read_artifact(tmp_path / "bad", layout_of)
        except IntegrityError:
            continue
        accepted += 1
        assert_same(artifact, SMALL, tensors)
        assert body[:48] + body[80:end] == good[:48] + good[80:end]
    assert accepted > 0


def test_what_is_not_a_file_of_ours(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "missing"):
        for read in (lambda path: read_artifact(path, layout_of), peek_spec, artifact_size):
            with pytest.raises(IntegrityError, match=name):
                read(tmp_path / name)  # type: ignore[no-untyped-call]


def test_peek_reads_the_spec_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "m", note="here")
    data = bytearray((tmp_path / "m").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m").write_bytes(data)
    assert json.loads(peek_spec(tmp_path / "m"))["note"] == "here"
    start = len(b"".join(parts_of(bytes(data))[: 2 + 6]))
    data[start] ^= 1
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(IntegrityError, match="the spec is damaged"):
        peek_spec(tmp_path / "m")


# ---- in a process of their own


def test_bombs_are_bounded_in_memory(tmp_path: Path) -> None:
    """A GiB of zeros in a few bytes, declared small or large: resident memory grows by less than 64 MiB."""
    compressor = brotli.Compressor(quality=9, lgwin=24)
    block = bytes(2**24)
    bomb = b"".join(compressor.process(block) for _ in range(64)) + compressor.finish()
    assert len(bomb) < 4096
    spec = spec_of([("a", Stored("codes", "i8", (1000,)))])
    large = spec_of([("a", Stored("codes", "i8", (2**30,)))])
    chunk = sections.CHUNK_BYTES
    packed, many = brotli.compress(spec), brotli.compress(large)
    thin = compress(block * 4, 11, Codec.LZMA)
    bombs = [
        forge([(0, thin, 1000)], version=2, flags=1),
        forge([(0, thin, sections.MAX_SPEC_BYTES)], version=2, flags=1),
        forge([(0, packed, len(spec)), (1 | 5 << 8, bomb, 3000)], version=2),
        forge([(0, many, len(large)), *[(1 | 5 << 8, bomb, chunk)] * 2048], version=2),
        forge([(0, bomb, 1000)]),
        forge([(0, bomb, sections.MAX_SPEC_BYTES)]),
        forge([(0, bomb, 2**30)]),
        forge([(0, packed, len(spec)), (1, bomb, 1000)]),
        forge([(0, packed, len(spec)), (1, bomb, chunk)]),
        forge([(0, many, len(large)), (1, bomb, 2**30)]),
        forge([(0, many, len(large)), *[(1, bomb, chunk)] * 2048]),
        forge([(0, many, len(large)), *[(1, b"", chunk)] * 2048]),
        forge([(0, packed, len(spec))], count=2**16),
    ]
    for i, data in enumerate(bombs):
        (tmp_path / f"bomb{i}").write_bytes(data)
    body = """
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_artifact(path, layout_of)
    except IntegrityError:
        print("refused")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    *refused, grown = in_process(body, *(str(tmp_path / f"bomb{i}") for i in range(len(bombs)))).split()
    assert refused == ["refused"] * len(bombs)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(grown) * unit < 64 * 2**20


@tiers("C31", files=(40, 200))
def test_reading_imports_and_runs_nothing(trials: Trials, tmp_path: Path) -> None:
    """Every audit event while reading, good and damaged, is one of opening and looking at files."""
    half = trials["files"] // 2
    for seed in range(half):
        write(tmp_path / f"m{seed}", SMALL, seed)
        data = bytearray((tmp_path / f"m{seed}").read_bytes())
        data[seed * 7 % len(data)] ^= 4
        (tmp_path / f"bad{seed}").write_bytes(data)
    (tmp_path / "pickle").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    body = """
read_artifact(sys.argv[1], layout_of)  # what Python and numpy import on first use
events, on = set(), False
def hook(event, arguments):
    if on:
        events.add(event)
sys.addaudithook(hook)
on = True
good = 0
for path in sys.argv[1:]:
    try:
        read_artifact(path, layout_of)
        good += 1
    except IntegrityError:
        pass
on = False
print(json.dumps([good, sorted(events)]))
"""
    names = [f"m{i}" for i in range(half)] + [f"bad{i}" for i in range(half)] + ["pickle"]
    assert json.loads(in_process(body, *(str(tmp_path / name) for name in names))) == [half, ["open"]]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "m")
    body = "read_artifact(sys.argv[1], layout_of); print('torch' in sys.modules)"
    assert in_process(body, str(tmp_path / "m")).strip() == "False"
