"""Damaged and hostile artifacts: refused before anything is handed out, in bounded time and memory."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import brotli
import pytest
from artifact_damage import forge, in_process, mutated, parts_of
from export_samples import SMALL, Layout, assert_same, layout_of, spec_of, write
from run_samples import HELPERS
from tiers import Trials, rounds_left, soak, tiers

from specc.compiler.quant.scheme import Stored
from specc.runtime.artifact import sections
from specc.runtime.artifact.artifact import read_artifact
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.errors import IntegrityError

LARGE: Layout = [*SMALL, ("e", Stored("codes", "i8", (3 * sections.CHUNK_BYTES,)))]


def refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as raised:
        read_artifact(path, layout_of)
    assert raised.value.exit_code == 5


@tiers("C21", bit_flips=(500, 10_000), truncations=(100, 2_000), splices=(50, 1_000))
def test_damage_is_noticed(trials: Trials, tmp_path: Path) -> None:
    rng = random.Random(21)
    write(tmp_path / "m")
    good = (tmp_path / "m").read_bytes()
    for _ in range(trials["bit_flips"]):
        bad, position = bytearray(good), rng.randrange(8 * len(good))
        bad[position // 8] ^= 1 << position % 8
        refused(tmp_path / "bad", bytes(bad))
    for _ in range(trials["truncations"]):
        refused(tmp_path / "bad", good[: rng.randrange(len(good))])
    for number, name in enumerate("ab"):
        write(tmp_path / name, LARGE, number, note=name)
    first, second = (parts_of((tmp_path / name).read_bytes()) for name in "ab")
    whole = (b"".join(first), b"".join(second))
    done = 0
    while done < trials["splices"]:
        mixed = list(first)
        for i in rng.sample(range(len(first)), rng.randint(1, 3)):
            mixed[i] = rng.choice([second[i], first[rng.randrange(len(first))], mixed[i] + second[i]])
        if b"".join(mixed) not in whole:
            refused(tmp_path / "bad", b"".join(mixed))
            done += 1


@tiers("C22", mutated_headers=(3_000, 100_000))
def test_mutated_headers_are_refused_or_say_the_same(trials: Trials, tmp_path: Path) -> None:
    """With true digests, so that every field is judged by itself. None takes a second."""
    tensors = write(tmp_path / "m")
    good, rng, slowest, accepted = (tmp_path / "m").read_bytes(), random.Random(22), 0.0, 0
    for _ in range(trials["mutated_headers"]):
        (tmp_path / "bad").write_bytes(mutated(good, rng))
        began = time.process_time()
        try:
            artifact = read_artifact(tmp_path / "bad", layout_of)
        except IntegrityError:
            continue
        finally:
            slowest = max(slowest, time.process_time() - began)
        accepted += 1
        assert_same(artifact, SMALL, tensors)
    assert slowest < 1 and accepted > 0


ROUND = 300  # seconds of fuzzing that a soak that is stopped need not repeat
# Messages from each stage of reading. A fuzzer whose inputs all fail in the header would not see the last of these.
DEEP = (
    "the header is damaged",
    "section # has the unknown kind #",
    "the stored spec is not valid for this version",
    "the sections do not have the sizes that the spec requires",
    "the table of arrays cannot be read",
    "an array of the table",
    "section # is not a valid brotli stream",
    "section # is not a valid lzma stream",
    "section # expands to more than the # bytes that the header declares",
    "the row order of section # is not a permutation",
)


@soak("C22", seconds_of_fuzzing=3_600)
def test_a_fuzzer_that_follows_coverage(trials: Trials, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Processor time. Every reader refuses an input within a second, or reads it: the same contents, which can be
    written again. The corpus of a soak that was stopped is used further."""
    pytest.importorskip("atheris", reason="needs the fuzzer: pip install atheris")
    seconds = trials["seconds_of_fuzzing"]
    sizes = {f"{first} of {seconds}": min(ROUND, seconds - first) for first in range(0, seconds, ROUND)}
    cache = pytestconfig.cache
    assert cache is not None
    corpus, report = cache.mkdir("fuzz_artifact"), tmp_path / "report"
    for name in rounds_left(cache, "C22", [*sizes]):
        words = [str(HELPERS / "fuzz_artifact.py"), str(sizes[name]), str(corpus), str(report)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        result = json.loads(report.read_text())
        print(name, result)
        assert result["accepted"] > 0 and result["slowest"] < 1
        if sizes[name] == ROUND:
            assert [message for message in DEEP if message not in result["messages"]] == []


@tiers("C23", bombs=(13, 50))
def test_bombs_are_bounded(trials: Trials, tmp_path: Path) -> None:
    """Up to 2 GiB in a few bytes: each takes less than half a second, and all of them less than 64 MiB."""
    rng = random.Random(23)
    block = bytes(2**24)
    compressor = brotli.Compressor(quality=9, lgwin=24)
    bomb = b"".join(compressor.process(block) for _ in range(64)) + compressor.finish()
    thin = compress(block * 4, 11, Codec.LZMA)
    assert len(bomb) < 4096
    small = spec_of([("a", Stored("codes", "i8", (1000,)))])
    large = spec_of([("a", Stored("codes", "i8", (2**30,)))])
    for i in range(trials["bombs"]):
        spec = rng.choice([small, large])
        declared = rng.choice([1, 1000, sections.CHUNK_BYTES, sections.MAX_SPEC_BYTES, 2**30, 2**32 - 1])
        count = rng.choice([1, 1, 2, 64, 2048])
        head = rng.choice([(0, brotli.compress(spec), len(spec)), (0, bomb, declared)])
        version, body = (2, thin) if rng.random() < 0.2 else (1, bomb)
        fields = {"version": version, "flags": 1} if body is thin else {}
        (tmp_path / f"{i}").write_bytes(forge([head, *[(1, body, declared)] * count], **fields))
    body = """
import time
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slowest = 0.0
for path in sys.argv[1:]:
    began = time.process_time()
    try:
        read_artifact(path, layout_of)
    except IntegrityError:
        print("refused")
    slowest = max(slowest, time.process_time() - began)
print(slowest, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    *answers, slowest, grown = in_process(body, *(str(tmp_path / str(i)) for i in range(trials["bombs"]))).split()
    assert answers == ["refused"] * trials["bombs"]
    assert float(slowest) < 0.5 and int(grown) < 64 * 2**20
