"""The loss scale: a constant one changes nothing, a changing one skips steps that overflow, and both resume exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import read_log
from test_train_loop import ends, go
from toy import Toy, train_spec, trainer

from specc.compiler.spec.precision import LossScaleSpec
from specc.runtime.errors import RunFailure
from specc.runtime.train.loop import Limits
from specc.runtime.train.loss_scale import LARGEST, LossScale
from specc.runtime.train.trainer import Trainer

CPU = torch.device("cpu")


def steps(run: Trainer, count: int) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for _ in range(count) for step in run.advance()]


def state(run: Trainer) -> dict[str, torch.Tensor]:
    snapshot = run.snapshot().copied()
    return {**snapshot.weights, **snapshot.optimizer, **{f"a.{k}": v for k, v in (snapshot.average or {}).items()}}


@pytest.mark.parametrize("scale", [1.0, 1024.0, {"initial": 1.0, "every": 1000}])
def test_a_scale_without_overflow_changes_no_bit(tmp_path: Path, scale: Any) -> None:
    runs = []
    for precision in ({}, {"loss_scale": scale}):
        run = trainer(tmp_path, train_spec(precision=precision))  # seeds the generator of the model's noise
        runs.append((steps(run, 6), state(run)))
    (plain, expected), (scaled, found) = runs
    assert plain == scaled
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_f16_without_a_scale_loses_gradients_that_a_scale_keeps(tmp_path: Path) -> None:
    def gradient(scale: float) -> torch.Tensor:
        model = Toy(0.0)
        model.spoil = lambda loss: loss * 1e-6
        run = trainer(tmp_path, train_spec(precision={"loss_scale": scale}, clip_norm=None), model, "f16")
        run.advance()
        return torch.cat([gradient.flatten() for gradient in run.masters.gradients])

    exact = Toy(0.0)
    exact.spoil = lambda loss: loss * 1e-6
    run = trainer(tmp_path, train_spec(clip_norm=None), exact)
    run.advance()
    expected = torch.cat([gradient.flatten() for gradient in run.masters.gradients])
    errors = [(gradient(scale) - expected).norm() / expected.norm() for scale in (1.0, 65536.0)]
    assert errors[1] < 0.002 < 0.02 < errors[0]


class Overflows:
    """A loss whose gradient overflows in some passes."""

    def __init__(self, *passes: int) -> None:
        self.passes, self.seen = passes, 0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return loss * float("inf") if self.seen in self.passes else loss


def test_a_step_that_overflows_changes_nothing_but_the_scale(tmp_path: Path) -> None:
    model = Toy()
    run = trainer(tmp_path, train_spec(precision={"loss_scale": {"initial": 64.0}}), model)
    model.spoil = Overflows(6)  # two passes a step: the second pass of step 3
    seen = []
    for step in range(1, 5):
        before = state(run)
        (result,) = run.advance()
        after = state(run)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        seen.append((result.step, result.skipped, result.loss_scale))
        if step == 3:
            assert changed == ["loss_scale.value", "loss_scale.finite", "loss_scale.skipped"]
        else:
            assert "embed" in changed and "a.embed" in changed
    assert seen == [(1, None, 64.0), (2, None, 64.0), (3, True, 64.0), (4, None, 32.0)]


def test_an_update_reads_the_mean_of_the_gradients_since_the_last_update(tmp_path: Path) -> None:
    """The weights do not move, and the momentum is the last gradient. The skipped step is an update."""

    def momenta(every: int, *overflows: int) -> list[torch.Tensor]:
        lion = {"kind": "lion", "match": "*", "lr": 0.0, "betas": (0.9, 0.0), "every": every}
        train = train_spec(precision={"loss_scale": {"initial": 64.0}}, optimizers=(lion,), clip_norm=None)
        model = Toy(0.0)
        model.spoil = Overflows(*overflows)
        run = trainer(tmp_path, train, model)
        return [state(run)["lion.momentum/embed"] for _ in range(4) if run.advance()]

    gradients = momenta(1)
    *_, mean = momenta(2, 3)
    torch.testing.assert_close(mean, (gradients[0] + gradients[2] + gradients[3]) / 3)


def test_a_constant_scale_and_the_least_scale_skip_nothing(tmp_path: Path) -> None:
    for scale in (1.0, {"initial": 1.0}):
        model = Toy()
        model.spoil = Overflows(1)
        run = trainer(tmp_path, train_spec(precision={"loss_scale": scale}), model)
        with pytest.raises(RunFailure, match="step 1: the loss is inf"):
            run.advance()


def test_growth_and_backoff_follow_a_plain_loop() -> None:
    scale = LossScale(LossScaleSpec(initial=1024.0, growth=4.0, backoff=0.25, every=3, least=2.0), CPU)
    generator = torch.Generator().manual_seed(3)
    value, sound, skipped = 1024.0, 0, 0
    for finite in (torch.rand(500, generator=generator) < 0.7).tolist():
        skips = not finite and value > 2
        assert (scale.value, float(scale.factor), scale.skips(finite)) == (value, value, skips)
        if finite:
            sound += 1
            if sound == 3:
                value, sound = min(value * 4, LARGEST), 0
        elif skips:
            value, sound, skipped = max(value / 4, 2.0), 0, skipped + 1
    assert scale.skipped == skipped > 50


def test_skipped_steps_are_logged_counted_and_resumed(tmp_path: Path) -> None:
    train = train_spec(
        precision={"loss_scale": {"initial": 256.0, "every": 4}}, validate_every=0, checkpoint_every=5, clip_norm=None
    )
    said: list[str] = []
    for name, parts in (("whole", (20,)), ("parts", (5, 20))):
        passes = Overflows(3, 4, 15, 31)
        for limit in parts:
            model = Toy()
            model.spoil = passes
            go(tmp_path, name, train, model=model, limits=Limits(steps=limit), said=said)
    assert ends(tmp_path, "whole") == ends(tmp_path, "parts")
    records = {name: read_log(tmp_path / name / "log.jsonl") for name in ("whole", "parts")}
    found = {
        name: [(r["step"], r.get("loss"), r.get("loss_scale"), r.get("skipped")) for r in lines if r["event"] == "step"]
        for name, lines in records.items()
    }
    assert found["whole"] == found["parts"]
    assert [step for step, _, _, skipped in found["whole"] if skipped] == [2, 8, 16]
    assert all(loss is None for _, loss, _, skipped in found["whole"] if skipped)
    assert records["parts"][-1]["skipped_steps"] == 3
    assert any(line.startswith("3 of 20 steps skipped; the loss scale is ") for line in said)
