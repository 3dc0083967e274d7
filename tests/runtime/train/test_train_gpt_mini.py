"""`train` from a spec to its end, with the module that the compiler generates for gpt_mini, made smaller."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import read_log, read_start
from toy import stream

from specc.compiler.errors import SpecError
from specc.compiler.spec import check
from specc.compiler.spec.spec import Spec
from specc.runtime.data.errors import DataError
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.model.load import instantiate
from specc.runtime.storage import checkpoint
from specc.runtime.storage.run_directory import Run, RunDirectoryError, locked
from specc.runtime.train.loop import TrainResult
from specc.runtime.train.train import TrainOptions, train

GPT_MINI = Path(__file__).parents[3] / "specs" / "gpt_mini.yaml"
SMALLER = (
    "model.dim=32",
    "model.context=32",
    "model.blocks.count=2",
    "model.blocks.layers.0.heads=2",
    "model.blocks.layers.0.kv_heads=1",
    "train.micro_batch=4",
    "train.tokens_per_step=256",
    "train.steps=18",
    "train.schedule.warmup_steps=4",
    "train.schedule.warmdown_steps=8",
    "train.average.decay=0.8",
    "train.validate_every=10",
    "train.validate_tokens=500",
    "train.checkpoint_every=6",
)


def small(*more: str) -> Spec:
    return check.load(GPT_MINI, (*SMALLER, *more))[0]


def go(folder: Path, name: str | None, said: list[str] | None = None, **options: Any) -> TrainResult:
    stream(folder)  # writes the text
    options = {
        "spec": small(),
        "target": "cpu",
        "data": str(folder / "text"),
        "overrides": SMALLER,
        **options,
    }
    run = folder / name if name is not None else None
    train_options = TrainOptions(run=run, cache=folder / "cache", **options)
    return train(train_options, (said if said is not None else []).append)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_log(run / "log.jsonl") if record["event"] == "step"]


def test_it_learns_and_resumes_exactly(tmp_path: Path) -> None:
    whole = go(tmp_path, "whole")
    assert whole.complete and whole.step == 18 and whole.averaged is not None
    assert whole.final.nats / whole.final.tokens < 0.75 * math.log(257) and len(losses(whole.run)) == 18
    said: list[str] = []
    for stop in (5, 13, None):
        part = go(tmp_path, "parts", said, resume="auto", stop_after_steps=stop)
    assert any("resuming after step 13" in text for text in said)
    assert losses(part.run) == losses(whole.run)
    assert part.final.nats == whole.final.nats and part.raw.nats == whole.raw.nats
    for name in ("model", "ema", "optimizer", "rng"):
        file = f"{name}.safetensors"
        assert (part.checkpoint / file).read_bytes() == (whole.checkpoint / file).read_bytes()


def test_the_run_says_what_it_was(tmp_path: Path) -> None:
    result = go(tmp_path, "run", stop_after_steps=1)
    run = Run.open(result.run)
    assert (run.spec, run.target, run.data) == (small(), "cpu", str(tmp_path / "text"))
    assert run.overrides == SMALLER and (run.generated / "cpu" / "model.py").is_file()
    names = {param.name for param in instantiate(small(), "cpu", tmp_path / "code").programs.params}
    assert checkpoint.weights(result.checkpoint).keys() == names
    state = checkpoint.load(result.checkpoint)
    assert {name.split("/")[1] for name in state.optimizer} == names
    assert state.spec_digest == run.spec_digest
    start = read_start(run.log)
    assert start["event"] == "start" and start["threads"] == torch.get_num_threads()


def test_runs_are_named_when_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert go(tmp_path, None, said, stop_after_steps=1).run == Path("runs/gpt_mini-001")
    assert said[0] == "run: runs/gpt_mini-001"
    assert go(tmp_path, None, stop_after_steps=1).run == Path("runs/gpt_mini-002")
    again = go(tmp_path, None, resume="auto", stop_after_steps=2)
    assert (again.run, again.step) == (Path("runs/gpt_mini-002"), 2)


def test_a_run_is_not_overwritten_nor_mixed(tmp_path: Path) -> None:
    run = go(tmp_path, "run", stop_after_steps=2).run
    before = losses(run)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        go(tmp_path, "run")
    with pytest.raises(RunDirectoryError, match=r"train\.seed: 1337 in the run, 1 now"):
        go(tmp_path, "run", spec=small("train.seed=1"), resume="auto")
    with locked(run), pytest.raises(RunDirectoryError, match="in use"):
        go(tmp_path, "run", resume="auto")
    assert losses(run) == before


def test_strays_are_swept_and_threads_are_watched(tmp_path: Path) -> None:
    run = go(tmp_path, "run", stop_after_steps=1).run
    stray = run / "checkpoints" / ".step_00000002.0123abcd.tmp"
    stray.mkdir()
    said: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        go(tmp_path, "run", said, resume="auto", stop_after_steps=1)
    finally:
        torch.set_num_threads(threads)
    assert not stray.exists()
    assert any(f"used {threads} threads and now has {threads + 1}" in text for text in said)


def test_what_does_not_fit_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a step of 250 tokens is not a whole number of micro-batches of 4 x 32"):
        small("train.tokens_per_step=250")
    with pytest.raises(SpecError, match="`vocab` is 256, but the tokenizer `bytes` has 257 ids"):
        small("model.vocab=256")
    with pytest.raises(DataError, match="no such file"):
        go(tmp_path, "run", data=str(tmp_path / "nowhere"))
    assert go(tmp_path, "run", stop_after_steps=1).step == 1  # the same place, once all fits


def test_without_a_gpu_a_gpu_target_is_an_environment_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFailure, match="target sm90 needs an NVIDIA GPU") as caught:
        go(tmp_path, "run", target="sm90")
    assert caught.value.exit_code == 3
