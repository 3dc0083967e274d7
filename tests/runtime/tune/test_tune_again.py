"""The search beside what it does not rule: what earlier searches left, other searches, and candidates that hang."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tune_samples import MACHINE, fake_nvcc

from specc.compiler.build import compile_spec
from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.plan.lock import NO_LOCK, Entry, Lock, read_lock, tile_data
from specc.compiler.plan.plan import Choice, Plan
from specc.compiler.spec.check import load
from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.timing import Measured
from specc.runtime.tune import journal, search
from specc.runtime.tune import prepare as preparing
from specc.runtime.tune.candidates import Candidate, candidates
from specc.runtime.tune.journal import Journal, key
from specc.runtime.tune.measure import Measurement
from specc.runtime.tune.merge import merged
from specc.runtime.tune.prepare import Prepared, prepare
from specc.runtime.tune.search import NodeResult, TuneOptions, tune
from specc.runtime.verify import judge

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "specs/gpt_mini.yaml"


def name_of(candidate: Candidate) -> tuple[str, str]:
    return candidate.rendered.module, candidate.label


class Bench:
    """Stands for a GPU: the time of a candidate is its place in the list; those that are `gone` cannot be called."""

    def __init__(self) -> None:
        self.gone: set[tuple[str, str]] = set()
        self.prepared_names: list[tuple[str, str]] = []
        self.timed: list[tuple[str, str]] = []
        self.meanwhile: list[Callable[[], object]] = []

    def started(self, choice: Choice, *others: object) -> "Bench":
        self.order = {name_of(c): i for i, c in enumerate(candidates(choice.site, "specs/gpt_mini.yaml"))}
        return self

    def prepared(self, listed: list[Candidate]) -> list[tuple[Candidate, Prepared | None]]:
        self.prepared_names += [name_of(candidate) for candidate in listed]
        return [(c, Prepared(0, "it has gone", False) if name_of(c) in self.gone else None) for c in listed]

    def first_time(self, candidate: Candidate) -> float:
        for happen in self.meanwhile:
            happen()
        self.timed.append(name_of(candidate))
        return 1.0 + self.order[name_of(candidate)]

    def side_by_side(self, chosen: list[Candidate]) -> dict[Candidate, float]:
        assert not {name_of(candidate) for candidate in chosen} & self.gone, "would raise"
        return {candidate: 1.0 + self.order[name_of(candidate)] for candidate in chosen}


@pytest.fixture
def bench(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`tune` with a GPU of one's own making."""
    gpu = Bench()
    fake_nvcc(tmp_path, monkeypatch, "")
    duration = Measured(1.0, 0.0)
    monkeypatch.setattr(search, "Measurement", gpu.started)
    monkeypatch.setattr(search, "device_for", lambda target: "cpu")
    monkeypatch.setattr(search, "machine_of", lambda device: MACHINE)
    monkeypatch.setattr(
        search.ceilings, "measure", lambda *given: Ceilings("bfloat16", 1 << 20, duration, 1, duration, duration)
    )
    return gpu


def searched(path: Path, lock: Lock = NO_LOCK, only: str = "mlp.up", fresh: bool = False) -> tuple[NodeResult, ...]:
    spec, _ = load(SPEC)
    return tune(TuneOptions(spec, "sm90", lock, path, only=only, fresh=fresh), lambda line: None)


def test_what_was_measured_before_and_cannot_be_called_now_is_rejected(tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "lock.json"
    first = searched(path)[0]
    labels = [name_of(candidate) for candidate in (*first.times, *first.reasons)]
    assert sorted(bench.timed) == sorted(set(bench.timed)) and set(labels) <= set(bench.timed) and len(labels) > 10
    bench.timed.clear(), bench.prepared_names.clear()
    bench.gone = set(labels[:2])
    again = searched(path)[0]
    assert bench.timed == [] and set(labels[:6]) <= set(bench.prepared_names)
    assert [name_of(candidate) for candidate in again.times][:4] == labels[2:6]
    assert {name_of(c): reason for c, reason in again.reasons.items()} == dict.fromkeys(labels[:2], "it has gone")
    best = next(iter(again.times)).kernel
    entry = read_lock(path).targets["sm90"].kernels[again.symbol]
    assert (entry.tile, entry.length) == (tile_data(best), load(SPEC)[0].model.window)
    bench.gone = set()  # installed again: what an earlier search found still holds
    assert [name_of(candidate) for candidate in searched(path)[0].times] == labels and bench.timed == []


def entry(name: str) -> Entry:
    tile = tile_data(GEMM_EVT)
    return Entry(node=name, key="linear()", kernel="gemm_evt", tile=tile, rows=1, ms=1.0, floor_ms=0.5)


def test_what_another_search_writes_meanwhile_stays(tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "lock.json"
    bench.meanwhile = [
        lambda: merged(path, lambda lock: lock.with_measured("sm90", MACHINE, {"theirs": entry("theirs")}))
    ]
    result = searched(path)
    assert set(read_lock(path).targets["sm90"].kernels) == {"theirs", *(option.symbol for option in result)}


def test_many_writers_of_one_lock_lose_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "lock.json"

    def write(name: str) -> None:
        merged(path, lambda lock: lock.with_measured("sm90", MACHINE, {name: entry(name)}))

    names = [f"kernel_{i}" for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, names))
    assert set(read_lock(path).targets["sm90"].kernels) == set(names)
    assert {file.name for file in tmp_path.iterdir()} == {"lock.json", "cache"}, "nothing is left beside it"


def test_a_result_holds_for_the_compiler_and_the_package_that_made_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = next(c.site for c in plan.choices if "leaky" in c.rendered.module)
    tried = list(candidates(site, plan.source))
    cuda = next(option for option in tried if option.source is not None)
    triton = next(option for option in tried if option.source is None)
    fake_nvcc(tmp_path, monkeypatch, "", "nvcc 1")
    before = key(cuda), key(triton)
    assert before == (key(cuda), key(triton)) and len(set(before)) == 2
    fake_nvcc(tmp_path, monkeypatch, "", "nvcc 2")
    assert key(cuda) != before[0] and key(triton) == before[1]
    second = key(cuda)
    monkeypatch.setattr(journal, "FLAGS", (*journal.FLAGS, "-lineinfo"))
    assert key(cuda) not in (second, before[0]) and key(triton) == before[1]
    monkeypatch.setattr(journal, "find_cutlass", lambda: ("0.0", tmp_path))
    assert key(cuda) not in (second, before[0]) and key(triton) == before[1]


def test_times_of_flash_attn_4_hold_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ("model.dim=256", 'fuse=[{"blocks.*.attention": [y]}]')
    site = compile_spec(SPEC, wide, ("sm90",)).plans["sm90"].choices[0].site
    tried = {c.kernel.name: c for c in candidates(site, "specs/x.yaml")}
    installed = {"flash-attn-4": "4.0"}
    monkeypatch.setattr(journal, "version", installed.__getitem__)
    before = {name: key(option) for name, option in tried.items()}
    installed["flash-attn-4"] = "4.1"
    assert {name for name, option in tried.items() if key(option) != before[name]} == {"flash_attention_4"}


def test_what_a_looser_judge_let_pass_is_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(MACHINE, "site", 128).add("a", 0.25)
    assert Journal(MACHINE, "site", 128).results == {"a": 0.25}
    monkeypatch.setattr(journal, "JUDGED", journal.JUDGED + 1)
    assert Journal(MACHINE, "site", 128).results == {}


def test_a_candidate_is_compiled_judged_and_timed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same steps as on a GPU, on the CPU's kernels; the judges are of few rows and of many."""
    monkeypatch.setattr(judge, "multiprocessors", lambda device: 2)
    small = ("model.dim=32", "model.context=32", "model.blocks.count=2", "train.micro_batch=2")
    plan = compile_spec(SPEC, small, ("cpu",)).plans["cpu"]
    choice = next(choice for choice in plan.choices if "dgrad" in choice.rendered.module)
    (candidate,) = candidates(choice.site, plan.source)
    ((name, text),) = candidate.files.items()
    wrong, late = (
        replace(candidate, files={name: text.replace("* slope", f"* slope * {by}")})
        for by in ("1.01", "(1 + (slope.shape[0] > 3))")
    )
    measurement = Measurement(choice, {"B": 2, "T": 32, "S": 32}, 1 << 30, tmp_path, torch.device("cpu"))
    assert len({option.digest for option in (candidate, wrong, late)}) == 3, "the text has what is replaced"
    assert dict(measurement.prepared([candidate])) == {candidate: None}
    assert isinstance(measurement.first_time(candidate), float)
    assert "RMS error" in str(measurement.first_time(wrong))
    assert "RMS error" in str(measurement.first_time(late)), "wrong in large batches only"


# --- what does not end ---


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting a while for it."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def written(pid: Path, alive: Callable[[], bool]) -> int:
    """The process id that a compiler has written, once it has."""
    while not pid.exists() or not pid.read_text():
        assert alive()
        time.sleep(0.05)
    return int(pid.read_text())


def test_a_candidate_that_does_not_end_is_ended_with_its_compiler(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    fake_nvcc(tmp_path, monkeypatch, f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n")
    (tmp_path / "kernel.cu").write_text("int hangs;\n")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(prepare([(0, tmp_path)], "kernel", "kernel", None)))
        compiler = written(pid, lambda: not waiting.done())
        monkeypatch.setattr(preparing, "DEADLINE", 0.0)
        assert waiting.result() == [Prepared(0, "did not finish within 0 s", lasting=True)]
    assert gone(compiler)


def test_nothing_goes_on_when_the_search_is_interrupted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    fake_nvcc(tmp_path, monkeypatch, f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n")
    (tmp_path / "kernel.cu").write_text("int hangs;\n")
    # What a shell starts in its background ignores the interrupt, and hands that on.
    main = (
        "import signal, sys\nfrom pathlib import Path\nfrom specc.runtime.tune.prepare import prepare\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    list(prepare([(0, Path(sys.argv[1]))], 'kernel', 'kernel', None))\n"
    )
    (tmp_path / "main.py").write_text(main)
    for number in (signal.SIGINT, signal.SIGKILL):
        pid.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "main.py"), str(tmp_path)], stderr=subprocess.DEVNULL
        )
        compiler = written(pid, lambda process=process: process.poll() is None)
        process.send_signal(number)
        assert process.wait(60) != 0
        assert gone(compiler)


def test_a_call_that_hangs_ends_the_search_and_is_left_out_of_the_next(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Exception):
        """Stands for the end of the process."""

    codes: list[int] = []
    monkeypatch.setattr(search, "LONGEST", 0.2)
    monkeypatch.setattr(search.os, "_exit", codes.append)

    def hang() -> None:
        time.sleep(0.6)
        raise Ended

    bench.meanwhile = [hang]
    with pytest.raises(Ended):
        searched(tmp_path / "lock.json")
    assert codes == [4] and bench.timed == []
    bench.meanwhile = []
    result = searched(tmp_path / "lock.json")[0]
    (hung,) = [candidate for candidate, reason in result.reasons.items() if reason == "did not finish within 0 s"]
    assert name_of(hung) not in bench.timed and len(bench.timed) > 10
