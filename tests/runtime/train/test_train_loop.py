"""The loop: what is logged and saved, what ends it, and that it goes on exactly after whatever ended it."""

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from log_lines import read_log
from toy import Toy, stream, train_spec, trainer
from toy_runs import go, losses

from specc.runtime.data.errors import DataIntegrityError
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.distributed.signals import Interrupted, Preempted
from specc.runtime.errors import EnvironmentFailure, RunFailure
from specc.runtime.log import Step, lines
from specc.runtime.metrics.validation import Validation
from specc.runtime.storage import checkpoint
from specc.runtime.train.loop import Limits


def ends(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name / "checkpoints" / "step_00000020"
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


def events(folder: Path, name: str, *kinds: str) -> list[tuple[Any, ...]]:
    records = read_log(folder / name / "log.jsonl")
    return [(record["event"], record["step"], record.get("weights")) for record in records if record["event"] in kinds]


def test_a_whole_run(tmp_path: Path) -> None:
    said: list[str] = []
    result = go(tmp_path, "run", train_spec(validate_every=8, checkpoint_every=6), said=said)
    assert (result.step, result.complete, result.run) == (20, True, tmp_path / "run")
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step_00000020"
    assert sorted(path.name for path in result.checkpoint.parent.iterdir()) == [
        "step_00000018",
        "step_00000020",
    ]
    assert events(tmp_path, "run", "validation", "checkpoint", "end") == [
        ("checkpoint", 6, None), ("validation", 8, "raw"), ("checkpoint", 12, None),
        ("validation", 16, "raw"), ("checkpoint", 18, None), ("checkpoint", 20, None),
        ("validation", 20, "raw"), ("validation", 20, "average"), ("end", 20, "average"),
    ]  # fmt: skip
    assert len(losses(tmp_path, "run")) == 20 and losses(tmp_path, "run")[-1] < losses(tmp_path, "run")[0]
    assert result.averaged is not None and result.final is result.averaged and result.raw.nats != result.averaged.nats
    assert len([text for text in said if "validation" in text]) == 4


def test_the_final_checkpoint_holds_what_was_scored_last(tmp_path: Path) -> None:
    for name, train in (("averaged", train_spec()), ("plain", train_spec(average=None))):
        result = go(tmp_path, name, train)
        model = Toy()
        model.load_state_dict(checkpoint.weights(result.checkpoint))
        final = trainer(tmp_path, train, model)
        again = final.evaluate(Validation(stream(tmp_path, "val"), ByteTokenizer(), 8, 200))
        assert again.nats == result.final.nats
        assert (result.averaged is None) == (name == "plain")


def test_ending_early_keeps_the_schedule_and_resuming_is_exact(tmp_path: Path) -> None:
    go(tmp_path, "whole")
    for until in (1, 7, 13, 13, 20):
        result = go(tmp_path, "parts", limits=Limits(steps=until))
        assert (result.step, result.complete) == (until, until == 20)
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    assert ends(tmp_path, "parts") == ends(tmp_path, "whole")
    rates = [r["lr"] for r in read_log(tmp_path / "parts" / "log.jsonl") if r["event"] == "step"]
    assert rates == pytest.approx([min((i + 1) / 3, 1, max((20 - i) / 10, 0.1)) for i in range(20)])


def test_resuming_a_complete_run_only_scores_it(tmp_path: Path) -> None:
    first, again = go(tmp_path, "run"), go(tmp_path, "run")
    assert (again.step, again.complete, again.final.nats) == (20, True, first.final.nats)
    assert len(losses(tmp_path, "run")) == 20


def test_max_seconds_ends_early(tmp_path: Path) -> None:
    result = go(tmp_path, "run", hook=lambda step: time.sleep(0.02), limits=Limits(seconds=0.1))
    assert 1 <= result.step <= 5 and not result.complete


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [(signal.SIGTERM, Preempted, 75), (signal.SIGHUP, Preempted, 75), (signal.SIGINT, Interrupted, 130)],
)
def test_signals_save_and_the_run_goes_on_exactly(
    tmp_path: Path, number: signal.Signals, error: type[Exception], code: int
) -> None:
    go(tmp_path, "whole")
    stops = sorted(random.Random(code).sample(range(1, 20), 3))

    def hook(step: Step) -> None:
        if stops and step.step == stops[0]:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    while stops:
        with pytest.raises(error) as caught:
            go(tmp_path, "stopped", hook=hook)
        path = tmp_path / "stopped" / "checkpoints" / f"step_{stops.pop(0):08d}"
        assert caught.value.exit_code == code and str(path) in caught.value.hint  # type: ignore[attr-defined]
        assert checkpoint.fault(path) is None
        assert signal.getsignal(number) is before
    go(tmp_path, "stopped")
    assert losses(tmp_path, "stopped") == losses(tmp_path, "whole")
    assert ends(tmp_path, "stopped") == ends(tmp_path, "whole")


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert go(tmp_path, "run", hook=lambda step: os.kill(os.getpid(), signal.SIGHUP)).complete
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_validation_saves(tmp_path: Path) -> None:
    """Also the final one: the run is then complete, and resuming it scores it again."""
    model = Toy()
    score = model.score
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) in (2, 7):
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*args)

    model.score = interrupted  # type: ignore[method-assign]
    train = train_spec(validate_every=10)
    for saved in (10, 20):
        with pytest.raises(Preempted):
            go(tmp_path, "run", train, model=model)
        assert checkpoint.latest(tmp_path / "run" / "checkpoints", print) == (
            tmp_path / "run" / "checkpoints" / f"step_{saved:08d}"
        )
    whole, result = go(tmp_path, "whole", train), go(tmp_path, "run", train)
    assert result.complete and result.final.nats == whole.final.nats
    assert ends(tmp_path, "run") == ends(tmp_path, "whole")


def test_a_validation_that_was_interrupted_is_made_on_resume(tmp_path: Path) -> None:
    """Once, if the run ends before it, in it or after it."""
    model, train = Toy(), train_spec(validate_every=5)
    go(tmp_path, "whole", train)
    score, due = model.score, [10]

    def interrupted(*args: Any) -> Any:
        if len(events(tmp_path, "run", "validation")) == 1 and due:
            due.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*args)

    def before(step: Step) -> None:
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    model.score = interrupted  # type: ignore[method-assign]
    for step in (5, 10):
        with pytest.raises(Preempted):
            go(tmp_path, "run", train, before, model=model)
        assert events(tmp_path, "run", "stopped")[-1] == ("stopped", step, None)
    assert go(tmp_path, "run", train, model=model, limits=Limits(15)).step == 15
    assert go(tmp_path, "run", train, model=model).complete

    def validations(name: str) -> list[tuple[int, str, float]]:
        records = [record for record in read_log(tmp_path / name / "log.jsonl") if record["event"] == "validation"]
        return [(record["step"], record["weights"], record["nats"]) for record in records]

    # a run that ends early also scores the weights that it ends with
    assert [entry for entry in validations("run") if entry[:2] != (15, "average")] == validations("whole")


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def hook(step: Step) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, "run", hook=hook)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    model = Toy()

    def hook(step: Step) -> None:
        if step.step == 9:
            model.spoil = lambda loss: loss * float("nan")

    with pytest.raises(RunFailure, match="step 10: the loss is nan"):
        go(tmp_path, "run", train_spec(checkpoint_every=4), hook, model=model)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints", print)
    assert newest is not None and newest.name == "step_00000008"
    assert events(tmp_path, "run", "failure") == [("failure", 9, None)]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in checkpoint.load(newest).weights.values())


def test_full_gpu_memory_names_what_to_lower(tmp_path: Path) -> None:
    model = Toy()

    def full(loss: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def hook(step: Step) -> None:
        if step.step == 4:
            model.spoil = full

    with pytest.raises(RunFailure, match="step 5: out of GPU memory") as caught:
        go(tmp_path, "run", train_spec(checkpoint_every=3), hook, model=model)
    assert caught.value.exit_code == 4 and "train.micro_batch" in caught.value.hint
    assert events(tmp_path, "run", "checkpoint", "failure") == [("checkpoint", 3, None), ("failure", 4, None)]


def test_data_that_is_cut_while_it_is_read_ends_the_run_and_it_can_go_on(tmp_path: Path) -> None:
    go(tmp_path, "whole", train_spec(checkpoint_every=5))
    (shard,) = tmp_path.glob("cache/train-*/*.bin")
    content = shard.read_bytes()

    def cut(step: Step) -> None:
        if step.step == 7:
            os.truncate(shard, 1024)

    with pytest.raises(DataIntegrityError, match="truncated while in use"):
        go(tmp_path, "cut", train_spec(checkpoint_every=5), cut)
    assert read_log(tmp_path / "cut" / "log.jsonl")[-1]["event"] == "failure"
    shard.write_bytes(content)
    go(tmp_path, "cut", train_spec(checkpoint_every=5))
    assert ends(tmp_path, "cut") == ends(tmp_path, "whole")


def test_a_full_disk_is_a_failure_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = train_spec(checkpoint_every=5)
    go(tmp_path, "whole", train)
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def hook(step: Step) -> None:
        if step.step == 9:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(EnvironmentFailure, match="step_00000010: No space left on device"):
        go(tmp_path, "run", train, hook)
    monkeypatch.setattr(os, "fsync", real)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000005"]
    go(tmp_path, "run", train)
    assert losses(tmp_path, "run") == losses(tmp_path, "whole")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    train = train_spec(checkpoint_every=4)
    go(tmp_path, "whole", train)
    go(tmp_path, "run", train, limits=Limits(steps=8))
    (tmp_path / "run" / "checkpoints" / "step_00000008" / "model.safetensors").write_bytes(b"")
    go(tmp_path, "run", train)
    assert losses(tmp_path, "run") == losses(tmp_path, "whole")
    assert ends(tmp_path, "run") == ends(tmp_path, "whole")


def test_a_budget_in_seconds_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 10 ms of a clock that only they move; validation and warming up take none of it."""
    now = [100.0]

    def tick(step: Step) -> None:
        now[0] += 0.01

    monkeypatch.setattr("specc.runtime.train.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    schedule = {"warmdown_steps": 10, "floor": 0.2}
    budget = train_spec(steps=None, budget_seconds=0.295, schedule=schedule, validate_every=4)
    result = go(tmp_path, "run", budget, hook=tick)
    assert result.complete and result.step == 30 and result.seconds == pytest.approx(0.3)
    steps = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["event"] == "step"]
    rates = [1.0] * 20 + [max((0.295 - 0.01 * step) / 0.1, 0.2) for step in range(20, 30)]
    assert [record["lr"] for record in steps] == pytest.approx(rates)
    go(tmp_path, "plain", train_spec(), limits=Limits(steps=1))
    assert steps[0]["loss"] == losses(tmp_path, "plain")[0]  # warming up left no trace


def test_a_resumed_budget_counts_what_was_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def tick(step: Step) -> None:
        now[0] += 1.0

    monkeypatch.setattr("specc.runtime.train.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    budget = train_spec(steps=None, budget_seconds=9.5, schedule={"warmdown_steps": 4})
    first = go(tmp_path, "run", budget, tick, Limits(steps=6))
    assert (first.step, first.seconds, first.complete) == (6, 6.0, False)
    now[0] = 5000.0
    second = go(tmp_path, "run", budget, tick)
    assert (second.step, second.seconds, second.complete) == (10, 10.0, True)
    rates = [record["lr"] for record in read_log(tmp_path / "run" / "log.jsonl") if record["event"] == "step"]
    assert rates == pytest.approx([1.0] * 6 + [3.5 / 4, 2.5 / 4, 1.5 / 4, 0.5 / 4])


def test_lines_come_at_each_twentieth() -> None:
    said: list[str] = []
    show = lines(said.append)
    for step in range(1, 401):
        show(Step(step, 1.0, 1.0, 1.0, 1e6, 1.0), step / 400)
    assert len(said) == 21 and said[0].startswith("  0%  step 1  loss 1.0000") and said[-1].startswith("100%")


@pytest.mark.parametrize("stop", [None, 4, 6, 7])
def test_a_run_ends_at_the_loss_that_it_should_reach(stop: int | None, tmp_path: Path) -> None:
    """At the first validation that reaches it, also after a resume, and not again beyond it."""
    plain = train_spec(validate_every=3, average=None)
    go(tmp_path, "plain", plain)
    records = read_log(tmp_path / "plain" / "log.jsonl")
    validations = [record for record in records if record["event"] == "validation"]
    nats_by_step = {record["step"]: record["nats"] for record in validations}
    assert nats_by_step[6] < nats_by_step[3]
    train = train_spec(validate_every=3, average=None, stop_at_loss=nats_by_step[6])
    said: list[str] = []
    if stop is not None:
        result = go(tmp_path, "run", train, limits=Limits(stop))
        assert result.step == min(stop, 6) and result.reached == result.complete == (stop >= 6)
    result = go(tmp_path, "run", train, said=said)
    assert (result.step, result.reached, result.complete) == (6, True, True)
    records = read_log(tmp_path / "run" / "log.jsonl")
    reached = [record for record in records if record["event"] == "reached"]
    assert {(record["step"], record["loss"], record["stop_at_loss"]) for record in reached} == {
        (6, nats_by_step[6], nats_by_step[6])
    }
    assert 0 < reached[0]["seconds"] <= reached[-1]["seconds"] <= result.seconds < reached[0]["seconds"] + 1
    assert any(f"reached {nats_by_step[6]:g} after" in line for line in said)
    assert [record.get("reached") for record in records if record["event"] == "end"][-1] is True
