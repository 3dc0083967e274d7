"""Real `specc` processes, killed with SIGKILL at random moments: what they had committed stays, and going on from it
gives the bytes that were to come.

`SPECC_KILLS` is how many moments there are in all (4 where unset), `SPECC_KILL_SEED` seeds their choice. With a GPU
target in `SPECC_KILL_TARGET` losses are compared within `SPECC_KILL_NOISE` (relative), and nothing byte by byte.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import Forked, ForkServer
from log_lines import read_log
from run_samples import SPEC, write_text

from specc.cli.app import run as command
from specc.runtime.open_model import read_verified
from specc.runtime.storage import checkpoint
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.run_directory import Run, is_run

KILLS = int(os.environ.get("SPECC_KILLS", "4"))
SEED = int(os.environ.get("SPECC_KILL_SEED", "0"))
TARGET = os.environ.get("SPECC_KILL_TARGET", "cpu")
NOISE = float(os.environ.get("SPECC_KILL_NOISE", "1e-2"))
SHARE = {"train": (KILLS + 1) // 2, "quantize": (KILLS + 2) // 4, "export": KILLS // 4}
STEPS = 60
SMALL = (
    f"targets=[{TARGET}]",
    "model.dim=64",
    "model.context=64",
    "model.blocks.count=2",
    "model.blocks.layers.0.heads=2",
    "model.blocks.layers.0.kv_heads=1",
    "train.micro_batch=4",
    "train.tokens_per_step=512",
    f"train.steps={STEPS}",
    "train.schedule={warmup_steps: 4, warmdown_steps: 20}",
    "train.average.decay=0.8",
    "train.validate_every=20",
    "train.validate_tokens=500",
    "train.checkpoint_every=3",
    "quant.calibrate={source: self, sequences: 6, batch: 4}",
    "quant.promote.count=2",
    *(("fuse=[]",) if TARGET != "cpu" else ()),  # kernels take a minute to compile, each time
)
BEFORE, AFTER = ("--max-tokens", "100"), ("--max-tokens", "150")  # reports that differ


@dataclass(frozen=True)
class Whole:
    """The output of a run that is not killed, and its seconds of work."""

    folder: Path
    run: Path
    data: Path
    losses: dict[int, float]
    before: dict[str, bytes]
    after: dict[str, bytes]
    exported: dict[str, bytes]
    seconds: dict[str, float]


def training(run: Path, data: Path) -> list[str]:
    overrides = [word for text in SMALL for word in ("--set", text)]
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
        seconds["train"] = 1.1 * read_log(run / "log.jsonl")[-1]["seconds"]  # what follows the last step is a little
        trained = content(run / "quantized")
        assert trained == {}
        timed("quantize", "quantize", str(run), *BEFORE)
        before = content(run / "quantized")
        timed("quantize", "quantize", str(run), *AFTER)
        exported = {}
        for kind in ("artifact", "safetensors"):
            timed("export", "export", str(run), "--format", kind, "--out", str(folder / kind))
            exported[kind] = (folder / kind).read_bytes()
        yield Whole(folder, run, data, losses(run), before, content(run / "quantized"), exported, seconds)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Imports torch, as a process of `specc` does in its first seconds; a GPU's context does not outlive a fork."""
    server = ForkServer("from specc.cli.app import main" + ("; import torch._dynamo" if TARGET == "cpu" else ""))
    yield server
    server.close()


class Victim:
    """Starts `specc` in a process of its own, and kills it."""

    def __init__(self, server: ForkServer, folder: Path, name: str) -> None:
        self.server = server
        self.folder, self.chance = folder, random.Random(f"{SEED} {name}")
        # A cache of its own: what is made once for all runs is interrupted too.
        self.env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.starting = 2.0  # seconds until it is at work: measured as it goes

    def start(self, words: list[str]) -> Forked:
        return self.server.start("main()", words, self.env, self.folder / "stderr")

    def errors(self) -> str:
        file = self.folder / "stderr"
        return file.read_text() if file.exists() else ""  # the process creates it

    def finish(self, words: list[str]) -> None:
        """Lets it come to its end."""
        assert self.start(words).wait() == 0, self.errors()

    def strike(self, words: list[str], at_work: Callable[[], bool], seconds: float) -> bool:
        """Kills it while it starts, one time in five, or within `seconds` of being at work; False where it was
        faster."""
        early, share = self.chance.random() < 0.2, self.chance.random()
        began = time.monotonic()
        process = self.start(words)
        try:
            if early:
                self._sleep(process, share * self.starting)
            else:
                while process.poll() is None and not at_work():
                    time.sleep(0.0005)
                self.starting = time.monotonic() - began
                self._sleep(process, share * seconds)
            done = process.poll()
        finally:
            process.kill()
            code = process.wait()
        assert done in (None, 0) and code in (0, -signal.SIGKILL), self.errors()
        return code != 0

    @staticmethod
    def _sleep(process: Forked, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.0005)


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


def test_training_goes_on_from_the_newest_checkpoint(whole: Whole, server: ForkServer, tmp_path: Path) -> None:
    victim, kills, number = Victim(server, tmp_path, "train"), 0, 0
    while kills < SHARE["train"]:
        number += 1
        assert number < 3 * KILLS, "it is faster than it can be killed"
        run, committed = tmp_path / f"run_{number}", 0
        words = [*training(run, whole.data), "--resume", "auto"]
        for _ in range(min(SHARE["train"] - kills, 4)):
            size = (run / "log.jsonl").stat().st_size if (run / "log.jsonl").exists() else 0

            def at_work(log: Path = run / "log.jsonl", size: int = size) -> bool:
                return log.exists() and log.stat().st_size > size

            if not victim.strike(words, at_work, whole.seconds["train"] * (1 - committed / STEPS)):
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
        assert list(result) == list(range(1, STEPS + 1)) and same_losses(result, whole.losses)
        assert all(same_losses({step: loss}, whole.losses) for step, loss in logged(run))
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000057", "step_00000060"]
        if TARGET == "cpu":
            for name in ("model", "ema", "optimizer", "rng"):
                file = f"checkpoints/step_{STEPS:08d}/{name}.safetensors"
                assert (run / file).read_bytes() == (whole.run / file).read_bytes()


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


def test_quantizing_leaves_the_old_or_the_new(whole: Whole, server: ForkServer, tmp_path: Path) -> None:
    victim, kills, seconds = Victim(server, tmp_path, "quantize"), 0, whole.seconds["quantize"]
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    words = ["quantize", str(run), *AFTER]
    for _ in range(3 * KILLS + 3):
        if kills == SHARE["quantize"]:
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
    assert kills == SHARE["quantize"]
    victim.finish(words)
    assert quantized_whole(run, whole)
    assert [path.name for path in (run / ".quantizing").iterdir()] == [".lock"]
    assert newest(run) == STEPS


@pytest.mark.soak  # every call of an export fails once in test_export_atomic.py
def test_exporting_leaves_the_old_or_the_new(whole: Whole, server: ForkServer, tmp_path: Path) -> None:
    victim, kills, seconds = Victim(server, tmp_path, "export"), 0, whole.seconds["export"]
    outs = tmp_path / "outs"
    outs.mkdir()
    words: dict[str, list[str]] = {}
    for kind in whole.exported:
        words[kind] = ["export", str(whole.run), "--format", kind, "--out", str(outs / kind), "--force"]
    for at in range(3 * KILLS + 3):
        if kills == SHARE["export"]:
            break
        kind = list(whole.exported)[at % 2]
        (outs / kind).write_bytes(b"what was there")
        names = set(os.listdir(outs))
        struck = victim.strike(words[kind], lambda names=names: set(os.listdir(outs)) != names, seconds)  # type: ignore[misc]
        result = (outs / kind).read_bytes()
        assert result in ((b"what was there", whole.exported[kind]) if struck else (whole.exported[kind],))
        kills, seconds = (kills + 1, seconds) if struck else (kills, 0.7 * seconds)
    assert kills == SHARE["export"]
    for kind, exported in whole.exported.items():
        victim.finish(words[kind])
        assert (outs / kind).read_bytes() == exported
    assert sorted(path.name for path in outs.iterdir()) == sorted(whole.exported)
