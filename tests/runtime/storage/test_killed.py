"""Real `specc` processes, killed with SIGKILL at random moments: what they had committed stays, and going on from it
gives the bytes that were to come.

`SPECC_KILLS` is how many moments each test has (few where unset), `SPECC_KILL_SEED` seeds their choice. With a GPU
target in `SPECC_KILL_TARGET` losses are compared within `SPECC_KILL_NOISE` (relative), and nothing byte by byte.
"""

import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import Forked, ForkServer
from log_lines import read_log
from ranks import environment
from run_samples import SPEC, write_text

from specc.cli.app import run as command
from specc.runtime.distributed.launch import PEER_LOST
from specc.runtime.open_model import read_verified
from specc.runtime.storage import checkpoint
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.run_directory import Run, is_run

KILLS = int(os.environ.get("SPECC_KILLS", "0"))
SEED = int(os.environ.get("SPECC_KILL_SEED", "0"))
TARGET = os.environ.get("SPECC_KILL_TARGET", "cpu")
NOISE = float(os.environ.get("SPECC_KILL_NOISE", "1e-2"))
TRAINING, OTHERS = KILLS or 2, KILLS or 1  # kills of each test
WORTH = 20  # kills from which on it pays to prepare a process that has already trained
COLD = 0.05  # of these kills hit processes that have not
ALONE = 60.0  # seconds in which the other processes end after the death of one
STEPS = 30
SMALL = (
    f"targets=[{TARGET}]",
    "model.dim=64",
    "model.context=64",
    "model.blocks.count=2",
    "model.blocks.layers.0.heads=2",
    "model.blocks.layers.0.kv_heads=1",
    "train.tokens_per_step=512",
    f"train.steps={STEPS}",
    "train.schedule={warmup_steps: 4, warmdown_steps: 10}",
    "train.average.decay=0.8",
    "train.validate_every=10",
    "train.validate_tokens=500",
    "train.checkpoint_every=3",
    "quant.calibrate={source: self, sequences: 6, batch: 4}",
    "quant.promote.count=2",
    *(("fuse=[]",) if TARGET != "cpu" else ()),  # kernels take a minute to compile, each time
)
BEFORE, AFTER = ("--max-tokens", "100"), ("--max-tokens", "150")  # reports that differ


@dataclass(frozen=True)
class Whole:
    """The output of runs that are not killed, by their number of processes, and the seconds of work."""

    folder: Path
    run: Path
    data: Path
    runs: dict[int, Path]
    before: dict[str, bytes]
    after: dict[str, bytes]
    exported: dict[str, bytes]
    seconds: dict[str, float]


def training(run: Path, data: Path, processes: int = 1) -> list[str]:
    """Eight rows of 64 tokens in a step."""
    overrides = [word for text in (*SMALL, f"train.micro_batch={min(4, 8 // processes)}") for word in ("--set", text)]
    return ["train", str(SPEC), "--run", str(run), "--data", str(data), "--target", TARGET, *overrides]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_log(run / "log.jsonl") if event["event"] == "step"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("killed")
    run, data = folder / "whole", write_text(folder / "data")
    seconds: dict[str, float] = {}

    def timed(name: str, *words: str) -> None:
        began = time.monotonic()
        assert command(list(words)) == 0
        seconds[name] = time.monotonic() - began

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        timed("train", *training(run, data))
        assert content(run / "quantized") == {}
        timed("quantize", "quantize", str(run), *BEFORE)
        before = content(run / "quantized")
        timed("quantize", "quantize", str(run), *AFTER)
        exported = {}
        for kind in ("artifact", "safetensors"):
            timed("export", "export", str(run), "--format", kind, "--out", str(folder / kind))
            exported[kind] = (folder / kind).read_bytes()
        yield Whole(folder, run, data, {1: run}, before, content(run / "quantized"), exported, seconds)


class Servers:
    """A Python that has imported torch, as a process of `specc` does in its first seconds; and, for many kills, one
    that has trained, quantized and exported, so that its forks are at work at once. Not on a GPU, whose context does
    not outlive a fork."""

    def __init__(self, whole: Whole) -> None:
        self.cold = ForkServer("from specc.cli.app import main" + ("; import torch._dynamo" if TARGET == "cpu" else ""))
        self.warm: ForkServer | None = None
        if KILLS >= WORTH and TARGET == "cpu":
            run, out = str(whole.folder / "warm"), str(whole.folder / "warm.specc")
            commands = [
                [*training(Path(run), whole.data), "--steps", "3"],
                ["quantize", run, *BEFORE],
                ["export", run, "--format", "artifact", "--out", out],
            ]
            code = f"""
import contextlib, os
from specc.cli.app import main, run
with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
    codes = [run(words) for words in {commands}]
assert codes == [0, 0, 0], codes
"""
            # A fork has no threads of OpenMP, and would wait for those that its server has used.
            self.warm = ForkServer(code, environment={**os.environ, "OMP_NUM_THREADS": "1"})

    def close(self) -> None:
        for server in (self.cold, self.warm):
            if server is not None:
                server.close()


@pytest.fixture(scope="module")
def servers(whole: Whole) -> Iterator[Servers]:
    servers = Servers(whole)
    yield servers
    servers.close()


class Job:
    """The processes of one command."""

    def __init__(self, processes: list[Forked]) -> None:
        self.processes = processes

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait(self) -> list[int]:
        return [process.wait() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


class Victim:
    """Starts `specc` in processes of its own, and kills them: all at once, or, while several train, also one of them,
    which ends the others."""

    def __init__(self, servers: Servers, folder: Path, name: str, processes: int = 1) -> None:
        self.servers, self.folder, self.processes = servers, folder, processes
        self.chance = random.Random(f"{SEED} {name}")
        # A cache of its own: what is made once for all runs is interrupted too.
        self.env = {**environment(), "XDG_CACHE_HOME": str(folder / "cache")}
        self.starting = {True: 0.0, False: 0.0}  # seconds until it is at work, cold or warm: measured as it goes

    def start(self, words: list[str], cold: bool = False) -> Job:
        server = self.servers.cold if cold or self.servers.warm is None else self.servers.warm
        if self.processes == 1:
            return Job([server.start("main()", words, self.env, self._stderr(0))])
        with socket.socket() as holder:  # no other program is assigned this port until rank 0 listens on it
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            size, port = str(self.processes), str(holder.getsockname()[1])
            env = {**self.env, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
            return Job(
                [
                    server.start(
                        "main()",
                        words,
                        {**env, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        self._stderr(rank),
                    )
                    for rank in range(self.processes)
                ]
            )

    def _stderr(self, rank: int) -> Path:
        return self.folder / f"stderr_{rank}"

    def errors(self) -> str:
        files = map(self._stderr, range(self.processes))  # the processes create them
        return "".join(file.read_text() for file in files if file.exists())

    def finish(self, words: list[str]) -> None:
        """Lets it come to its end."""
        assert set(self.start(words).wait()) == {0}, self.errors()

    def strike(self, words: list[str], at_work: Callable[[], bool], seconds: float) -> bool:
        """Kills it while it starts, one time in five, or within `seconds` of being at work; False where it was
        faster."""
        cold = self.servers.warm is None or self.chance.random() < COLD
        early, share = self.starting[cold] > 0 and self.chance.random() < 0.2, self.chance.random()
        alone = not early and self.processes > 1 and self.chance.random() < 0.5
        began = time.monotonic()
        job = self.start(words, cold)
        try:
            if early:
                self._sleep(job, share * self.starting[cold])
            else:
                while not job.ended() and not at_work():
                    time.sleep(0.0005)
                self.starting[cold] = time.monotonic() - began
                self._sleep(job, share * seconds)
            killed = self.chance.choice(job.processes) if alone else None
            if killed is not None:
                killed.kill()
                self._sleep(job, ALONE)
                assert job.ended(), f"the others go on after {ALONE} s: {self.errors()}"
        finally:
            job.kill()
            codes = job.wait()
        fine = {0, -signal.SIGKILL, *((PEER_LOST,) if alone else ())}
        assert set(codes) <= fine and "Traceback" not in self.errors(), (codes, self.errors())
        return set(codes) != {0}

    @staticmethod
    def _sleep(job: Job, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not job.ended():
            time.sleep(0.0005)


def seconds_of(run: Path) -> float:
    """The seconds of the steps of a run, and a little more: what follows the last is short."""
    return 1.1 * float(read_log(run / "log.jsonl")[-1]["seconds"])


def newest(run: Path) -> int:
    """The step of the newest checkpoint; none may be damaged."""
    warned: list[str] = []
    path = checkpoint.latest(run / "checkpoints", warned.append)
    assert warned == []
    return 0 if path is None else checkpoint.load(path).step


def same_losses(losses_by_step: dict[int, float], expected: dict[int, float]) -> bool:
    if TARGET != "cpu":
        return losses_by_step == pytest.approx({step: expected[step] for step in losses_by_step}, rel=NOISE)
    return all(losses_by_step[step] == expected[step] for step in losses_by_step)


def logged(run: Path) -> Iterator[tuple[int, float]]:
    """Every step that any process logged, also those that a kill took back."""
    for line in (run / "log.jsonl").read_text().splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # a line that a kill cut
        if record["event"] == "step":
            yield record["step"], record["loss"]


@pytest.mark.parametrize("processes", [1, *(pytest.param(many, marks=pytest.mark.soak) for many in (2, 8))])
def test_training_goes_on_from_the_newest_checkpoint(
    processes: int, whole: Whole, servers: Servers, tmp_path: Path
) -> None:
    """In one process or several, whose losses are compared with those of as many."""
    victim, kills, number = Victim(servers, tmp_path, "train", processes), 0, 0
    if processes not in whole.runs:
        whole.runs[processes] = whole.folder / f"whole of {processes}"
        victim.finish(training(whole.runs[processes], whole.data, processes))
    expected, seconds = losses(whole.runs[processes]), seconds_of(whole.runs[processes])
    while kills < TRAINING:
        number += 1
        assert number < 3 * TRAINING + 12, "it is faster than it can be killed"
        run, committed = tmp_path / f"run_{number}", 0
        words = [*training(run, whole.data, processes), "--resume", "auto"]
        for _ in range(min(TRAINING - kills, 4)):
            size = (run / "log.jsonl").stat().st_size if (run / "log.jsonl").exists() else 0

            def at_work(log: Path = run / "log.jsonl", size: int = size) -> bool:
                return log.exists() and log.stat().st_size > size

            if not victim.strike(words, at_work, seconds * (1 - committed / STEPS)):
                committed = newest(run)  # it ended before it was killed
                break
            kills += 1
            if "resuming after" in (stderr := victim.errors()):
                assert f"resuming after step {committed} " in stderr
            assert is_run(run) or committed == 0
            if is_run(run):
                assert Run.open(run).target == TARGET
                assert newest(run) >= committed
                committed = newest(run)
        finished = committed == STEPS  # killed while it scored what it had already committed
        victim.finish(words)
        if committed and not finished:
            assert f"resuming after step {committed} " in victim.errors()
        assert "damaged" not in victim.errors()
        result = losses(run)
        assert list(result) == list(range(1, STEPS + 1)) and same_losses(result, expected)
        assert all(same_losses({step: loss}, expected) for step, loss in logged(run))
        last = f"step_{STEPS:08d}"
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step_{STEPS - 3:08d}", last]
        if TARGET == "cpu":
            for name in ("model", "ema", "optimizer", "rng"):
                file = f"checkpoints/{last}/{name}.safetensors"
                assert (run / file).read_bytes() == (whole.runs[processes] / file).read_bytes()
        shutil.rmtree(run)


def quantized_whole(run: Path, whole: Whole) -> bool:
    """Whether the run has what it was quantized to at last, else what it was before: each of them whole."""
    result = content(run / "quantized")
    if TARGET != "cpu":
        assert result.keys() == whole.after.keys()
    else:
        assert result in (whole.before, whole.after)
    folder = Committed.open(run / "quantized")
    assert all(folder.read(name) for name in folder.members)
    read_verified(run / "quantized" / "model.specc")
    return result != whole.before


def test_quantizing_leaves_the_old_or_the_new(whole: Whole, servers: Servers, tmp_path: Path) -> None:
    victim, kills, seconds = Victim(servers, tmp_path, "quantize"), 0, whole.seconds["quantize"]
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    words = ["quantize", str(run), *AFTER]
    for _ in range(3 * OTHERS + 3):
        if kills == OTHERS:
            break
        shutil.rmtree(run / "quantized")
        (run / "quantized").mkdir()
        for name, data in whole.before.items():
            (run / "quantized" / name).write_bytes(data)
        if victim.strike(words, lambda: bool(victim.errors()), seconds):
            kills += 1
            quantized_whole(run, whole)
        else:
            assert quantized_whole(run, whole)
            seconds *= 0.7
    assert kills == OTHERS
    victim.finish(words)
    assert quantized_whole(run, whole)
    assert [path.name for path in (run / ".quantizing").iterdir()] == [".lock"]
    assert newest(run) == STEPS


@pytest.mark.soak  # every call of an export fails once in test_export_atomic.py
def test_exporting_leaves_the_old_or_the_new(whole: Whole, servers: Servers, tmp_path: Path) -> None:
    victim, kills, seconds = Victim(servers, tmp_path, "export"), 0, whole.seconds["export"]
    outs = tmp_path / "outs"
    outs.mkdir()
    words: dict[str, list[str]] = {}
    for kind in whole.exported:
        words[kind] = ["export", str(whole.run), "--format", kind, "--out", str(outs / kind), "--force"]
    for at in range(3 * OTHERS + 3):
        if kills == OTHERS:
            break
        kind = list(whole.exported)[at % 2]
        (outs / kind).write_bytes(b"what was there")
        names = set(os.listdir(outs))
        struck = victim.strike(words[kind], lambda names=names: set(os.listdir(outs)) != names, seconds)  # type: ignore[misc]
        result = (outs / kind).read_bytes()
        assert result in ((b"what was there", whole.exported[kind]) if struck else (whole.exported[kind],))
        kills, seconds = (kills + 1, seconds) if struck else (kills, 0.7 * seconds)
    assert kills == OTHERS
    for kind, exported in whole.exported.items():
        victim.finish(words[kind])
        assert (outs / kind).read_bytes() == exported
    assert sorted(path.name for path in outs.iterdir()) == sorted(whole.exported)
