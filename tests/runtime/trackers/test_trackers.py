"""Trackers receive the log and change nothing else: no loss, no weight, no exit code."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import outputs
from run_samples import HELPERS, small_spec, write_text

from specc.cli.app import run as specc
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.storage import checkpoint
from specc.runtime.storage.records import Records
from specc.runtime.trackers.open import UnknownTracker, require_trackers, tracker_names
from specc.runtime.trackers.tracker import numbers_of
from specc.runtime.train.train import TrainOptions, train

SPEC = ("train.validate_every=1", "train.validate_tokens=128")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "data")


def go(folder: Path, data: Path, *names: str, said: list[str] | None = None, **more: Any) -> Records:
    options = TrainOptions(
        small_spec(*SPEC), "cpu", str(data), folder, cache=folder.parent / "cache", track=names, **more
    )
    train(options, (said if said is not None else []).append)
    return Records.read(folder / "log.jsonl")


class FakeRun:
    """A run of a fake tracker, which uses up random numbers."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.logged, self.finished = settings, list[tuple[int, dict[str, float]]](), 0
        torch.rand(7)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))
        torch.rand(3), random.random()

    def finish(self) -> None:
        self.finished += 1


def fake(monkeypatch: pytest.MonkeyPatch, name: str, run_class: type[FakeRun] = FakeRun) -> list[FakeRun]:
    """A module of this name whose `init` gives fake runs, which are returned."""
    runs: list[FakeRun] = []
    module = ModuleType(name)

    def init(**settings: Any) -> FakeRun:
        runs.append(run_class(**settings))
        return runs[-1]

    module.init = init  # type: ignore[attr-defined]
    module.finish = lambda: runs[-1].finish()  # type: ignore[attr-defined]
    module.__spec__ = object()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, name, module)
    return runs


def same_training(one: Path, other: Path) -> None:
    """Asserts that all losses and weights of two runs are equal in every bit."""
    logs = [Records.read(folder / "log.jsonl") for folder in (one, other)]
    for event, field in (("step", "loss"), ("step", "grad_norm"), ("validation", "nats")):
        values = [log.series(event, field) for log in logs]
        assert values[0] and values[0] == values[1]
    weights = [checkpoint.load(checkpoint.all_in(folder / "checkpoints")[-1]) for folder in (one, other)]
    assert all(torch.equal(weights[0].weights[name], tensor) for name, tensor in weights[1].weights.items())
    assert torch.equal(weights[0].rng["cpu"], weights[1].rng["cpu"])


def expected(records: Records) -> list[tuple[int, Mapping[str, float]]]:
    """The calls that a tracker receives for a log."""
    every = [(r["step"], numbers_of(r["event"], {k: v for k, v in r.items() if k != "event"}))
             for r in records.all if "step" in r]  # fmt: skip
    return [(step, numbers) for step, numbers in every if numbers]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_receives_the_log_and_changes_no_bit(
    name: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "plain", data)
    runs = fake(monkeypatch, name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    records = go(tmp_path / "tracked", data, name, name)
    same_training(tmp_path / "plain", tmp_path / "tracked")
    (tracked,) = runs  # once, though it is named twice
    assert tracked.logged == expected(records) and tracked.finished == 1
    steps = [(step, numbers["step/loss"]) for step, numbers in tracked.logged if "step/loss" in numbers]
    assert steps == records.series("step", "loss") and len(steps) == 3
    assert any("validation/average/bpb" in numbers for _, numbers in tracked.logged)
    assert tracked.settings["project"] == "gpt_mini" and tracked.settings["config"]["name"] == "gpt_mini"
    if name == "wandb":
        assert tracked.settings["mode"] == "offline" and tracked.settings["dir"] == str(tmp_path / "tracked")


def test_tensorboard_holds_the_numbers_of_the_log(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'specc[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go(tmp_path / "plain", data)
    records = go(tmp_path / "tracked", data, "tensorboard")
    same_training(tmp_path / "plain", tmp_path / "tracked")
    events = EventAccumulator(str(tmp_path / "tracked" / "tensorboard")).Reload()
    loss = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert loss == [(step, pytest.approx(value, rel=1e-6)) for step, value in records.series("step", "loss")]
    go(tmp_path / "parts", data, "tensorboard", stop_after_steps=2)
    go(tmp_path / "parts", data, "tensorboard", resume="auto")
    events = EventAccumulator(str(tmp_path / "parts" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("step/loss")] == [1, 2, 3]


def test_trackio_stores_the_run(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="pip install 'specc[trackio]'")
    import sqlite3

    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_trackers as t; "
        "t.go(Path(sys.argv[2]), Path(sys.argv[3]), 'trackio')"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "db")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), *sys.path])
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "run"), str(data)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "db" / "gpt_mini.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    losses = [(step, json.loads(text)["step/loss"]) for step, text in rows if "step/loss" in json.loads(text)]
    assert losses == Records.read(tmp_path / "run" / "log.jsonl").series("step", "loss")
    assert done.stdout == ""


def test_a_failing_tracker_is_reported_once_and_training_goes_on(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeRun):
        def log(self, numbers: dict[str, float], step: int) -> None:
            if step == 2:
                raise RuntimeError("database is locked")
            super().log(numbers, step)

    runs, said = fake(monkeypatch, "wandb", Failing), list[str]()
    go(tmp_path / "plain", data)
    go(tmp_path / "tracked", data, "wandb", said=said)
    same_training(tmp_path / "plain", tmp_path / "tracked")
    assert [line for line in said if "database is locked" in line] == [
        "the tracker wandb failed, and training continues without it: database is locked"
    ]
    assert max(step for step, _ in runs[0].logged) == 1 and runs[0].finished == 1


def test_a_tracker_that_cannot_start_ends_the_command(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FakeRun):
        def __init__(self, **settings: Any) -> None:
            raise OSError("no space left")

    fake(monkeypatch, "wandb", Broken)
    with pytest.raises(EnvironmentFailure, match="the tracker wandb cannot start: no space left"):
        go(tmp_path / "run", data, "wandb")


def test_missing_packages_and_unknown_names(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specc.runtime.trackers.open.find_spec", lambda name: None)
    for name in tracker_names():
        with pytest.raises(EnvironmentFailure, match=f"needs the package {name}"):
            require_trackers([name])
    with pytest.raises(UnknownTracker, match="there is no tracker 'tensorbord'"):
        require_trackers(["tensorbord"])
    command = ["train", "specs/gpt_mini.yaml", "--data", str(data), "--run", str(tmp_path / "run")]
    assert specc([*command, "--track", "wandb"]) == 3
    assert "pip install 'specc[wandb]'" in capsys.readouterr().err
    assert specc([*command, "--track", "tensorbord"]) == 2
    assert "tensorboard" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_help_names_every_tracker_and_each_has_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    import tomllib

    assert tracker_names() == ("tensorboard", "trackio", "wandb")
    assert specc(["train", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for name in tracker_names():
        assert name in words and extras["optional-dependencies"][name][0].startswith(name)


def test_the_numbers_of_records() -> None:
    loads = {"blocks.0.moe": [0.5, 0.25, 0.25, 0.0]}
    terms = {"z": 2.5, "moe.balance": 1}
    shown = {"losses/raw/z": 2.5, "losses/raw/moe.balance": 1.0}
    assert numbers_of("losses", {"step": 3, "weights": "raw", "terms": terms}) == shown
    assert numbers_of("experts", {"step": 3, "weights": "raw", "loads": loads}) == {"experts/raw/blocks.0.moe": 2.0}
    record = {"step": 3, "weights": "average", "nats": 1.5, "tokens": 7, "bpb": None, "name": "x", "complete": True}
    assert numbers_of("validation", record) == {"validation/average/nats": 1.5, "validation/average/tokens": 7.0}


def test_only_the_process_that_writes_the_log_tracks(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "scene.py"
    script.write_text(
        f"import sys, types, os; sys.path.append({str(HELPERS)!r})\n"
        "module = types.ModuleType('wandb'); module.__spec__ = object()\n"
        "class R:\n"
        "    def log(self, numbers, step): open(sys.argv[1] + '/by' + os.environ['RANK'], 'a').write(f'{step} ')\n"
        "    def finish(self): pass\n"
        "module.init = lambda **k: R(); sys.modules['wandb'] = module\n"
        "from pathlib import Path\n"
        "from run_samples import small_spec\n"
        "from specc.runtime.distributed.world import joined\n"
        "from specc.runtime.train.train import TrainOptions, train\n"
        "with joined() as world:\n"
        "    spec, folder = small_spec('train.micro_batch=2'), Path(sys.argv[1])\n"
        "    run, cache = folder / 'run', folder / 'cache'\n"
        "    options = TrainOptions(spec, 'cpu', sys.argv[2], run, track=('wandb',), cache=cache)\n"
        "    train(options, lambda line: None, world)\n"
    )
    ended = outputs(str(script), 2, tmp_path, str(tmp_path), str(data))
    assert [code for code, *_ in ended] == [0, 0], ended
    assert sorted(path.name for path in tmp_path.glob("by*")) == ["by0"]
    assert {"1", "2", "3"} <= set((tmp_path / "by0").read_text().split())
