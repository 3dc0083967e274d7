"""Master weights in bf16: stochastic rounding is unbiased, small updates are not lost, and runs resume exactly."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, tiny
from torch import Tensor
from toy import Toy, train_spec, trainer

from specc.compiler.spec.train import EmaSpec
from specc.runtime.bench.step import random_trainer
from specc.runtime.model.load import instantiate
from specc.runtime.optim import masters as module
from specc.runtime.optim.average import Average
from specc.runtime.optim.masters import Masters, _round_stochastically
from specc.runtime.optim.schedule import Moment
from specc.runtime.storage import checkpoint
from specc.runtime.train.trainer import Trainer

BF16 = {"compute": "bf16", "masters": "bf16"}
NAMES = ("embed", "blocks.up", "blocks.down", "blocks.gain")
MIXED = dict(zip(NAMES, (*[torch.bfloat16] * 3, torch.float32), strict=True))


def in_bf16() -> tuple[Toy, Masters]:
    masters = Masters(model := Toy(), MIXED, in_bf16=True)
    masters.release()
    return model, masters


@pytest.mark.parametrize("seed", range(4))
def test_rounding_is_to_a_neighbor_and_unbiased(seed: int) -> None:
    """Against the neighbors in float64: each value is one of the two, and its mean is the value itself."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, generator=generator) * 2.0 ** torch.randint(-30, 30, (64,), generator=generator)
    down = (values.view(torch.int32) & -65536).view(torch.float32).double()
    up = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32).double()
    torch.manual_seed(seed)
    count = 20_000
    rounded = values.repeat(count, 1)
    _round_stochastically(rounded)
    result = rounded.double()
    assert bool(((result == down) | (result == up)).all()) and torch.equal(rounded.bfloat16().float(), rounded)
    share = (values.double() - down) / (up - down)
    chosen = (result == up).double().mean(0)
    deviation = (share * (1 - share) / count).sqrt()
    assert bool(((chosen - share).abs() <= 5 * deviation + 1e-9).all())


def test_what_bf16_represents_does_not_change() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for _ in range(3):
        rounded = every.clone()
        _round_stochastically(rounded)
        same = rounded == every
        assert bool((same | (every.isnan() & rounded.isnan())).all())
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    _round_stochastically(largest)
    assert bool((largest >= torch.finfo(torch.bfloat16).max).all())


def test_updates_below_the_resolution_add_up() -> None:
    model, masters = in_bf16()
    torch.manual_seed(0)
    with torch.no_grad():
        model.embed.fill_(1.0)
        for _ in range(256):
            with masters.in_f32():
                masters.tensors["embed"].add_(2.0**-12)  # 1/16 of what bf16 can tell from 1
    values = model.embed.detach().double()
    assert model.embed.dtype == torch.bfloat16
    # a sum of 256 roundings, each of a variance below (2^-7)^2 / 16
    assert abs(float(values.mean()) - 1.0625) < 5 * 2.0**-7 / 4 * 16 / values.numel() ** 0.5
    assert 0.01 < float(values.std()) < 2.0**-7 / 4 * 16 * 1.2


def test_masters_hold_nothing_outside_an_update() -> None:
    model, masters = in_bf16()
    before = {name: weight.clone() for name, weight in masters.weights().items()}
    assert masters.tensors["embed"].isnan().all() and masters.tensors["embed"].untyped_storage().nbytes() == 4
    assert masters.tensors["blocks.gain"] is model.blocks.gain
    with masters.in_f32():
        assert all(torch.equal(masters.tensors[name], before[name]) for name in NAMES)
        masters.tensors["blocks.up"].data.mul_(2)
    assert torch.equal(masters.weights()["blocks.up"], 2 * before["blocks.up"])
    assert torch.equal(masters.weights()["embed"], before["embed"]), "a weight that no update changes stays exactly"
    assert masters.digests()["embed"] == int(before["embed"].view(torch.int32).sum(dtype=torch.int64))
    with torch.no_grad():
        model.blocks.down[0, 0] = float("nan")
    assert masters.first_not_finite() == "blocks.down"


def test_reading_the_masters_draws_no_number() -> None:
    _, masters = in_bf16()
    state = torch.get_rng_state()
    with masters.in_f32(changes=False):
        assert not masters.tensors["embed"].isnan().any()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_average_reads_the_weights() -> None:
    model, masters = in_bf16()
    average = Average(EmaSpec(kind="ema", decay=0.75), masters.weights)
    expected = {name: weight.double() for name, weight in masters.weights().items()}
    for step in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        average.update(step + 1, Moment())
        now = masters.weights()
        expected = {name: 0.75 * value + 0.25 * now[name].detach().double() for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(average.tensors[name].double(), value, rtol=1e-6, atol=1e-6)


def go(folder: Path, precision: dict[str, Any], steps: int, **changes: Any) -> tuple[Trainer, list[float]]:
    run = trainer(folder, train_spec(precision=precision, steps=steps, **changes), Toy(0.0), "bf16")
    return run, [step.loss for _ in range(steps) for step in run.advance()]


@pytest.mark.parametrize("cautious", [False, True])
def test_a_short_run_ends_where_one_with_f32_masters_does(tmp_path: Path, cautious: bool) -> None:
    """And rounding to the nearest does not, because the updates are smaller than half a step of bf16."""
    optimizers = ({"kind": "adamw", "match": "*", "lr": 3e-4, "weight_decay": 0.01, "cautious_decay": cautious},)
    words: dict[str, Any] = {"optimizers": optimizers, "schedule": {}}
    _, exact = go(tmp_path, {"compute": "bf16"}, 150, **words)
    run, stochastic = go(tmp_path, BF16, 150, **words)
    assert {p.dtype for p in run._module.parameters()} == {torch.bfloat16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_round_stochastically", lambda values: None)  # the copy then rounds to the nearest
        _, nearest = go(tmp_path, BF16, 150, **words)
    ends = [sum(losses[-10:]) / 10 for losses in (exact, stochastic, nearest)]
    gained = exact[0] - ends[0]
    assert gained > 0.2
    assert abs(ends[1] - ends[0]) < 0.1 * gained
    assert ends[2] - ends[0] > 2 * abs(ends[1] - ends[0])


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    words = {"precision": BF16}
    whole = trainer(tmp_path, train_spec(**words), dtype="bf16")
    for _ in range(12):
        whole.advance()
    first = trainer(tmp_path, train_spec(**words), dtype="bf16")
    for _ in range(5):
        first.advance()
    checkpoint.save(tmp_path / "checkpoints", first.snapshot())
    again = trainer(tmp_path, train_spec(**words), dtype="bf16")
    newest = checkpoint.latest(tmp_path / "checkpoints", lambda line: None)
    assert newest is not None
    again.restore(checkpoint.load(newest))
    for _ in range(7):
        again.advance()
    assert state(again).keys() == state(whole).keys()
    assert all(torch.equal(value, state(again)[name]) for name, value in state(whole).items())
    weights = whole.snapshot().weights.values()
    assert all(weight.dtype == torch.float32 for weight in weights)  # as of a run with f32 masters


def state(run: Trainer) -> dict[str, Tensor]:
    snapshot = run.snapshot().copied()
    return {**snapshot.weights, **snapshot.optimizer, **{f"a.{k}": v for k, v in (snapshot.average or {}).items()}}


def test_warming_up_changes_nothing(tmp_path: Path) -> None:
    run = trainer(tmp_path, train_spec(precision=BF16), dtype="bf16")
    before, draws = state(run), torch.get_rng_state()
    run.warm_up(257)
    assert all(torch.equal(value, before[name]) for name, value in state(run).items())
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.gpu
def test_captured_updates(tmp_path: Path) -> None:
    """Update and backward passes are CUDA graphs with one pool of memory."""
    ends = {}
    for masters in ("f32", "bf16"):
        spec = tiny((ATTENTION, {**MLP, "hidden": 1024}), dim=256, vocab=4096, context=256)
        precision = spec.train.precision.model_copy(update={"compute": "bf16", "masters": masters})
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
        with ExitStack() as stack:
            run = random_trainer(instantiate(spec, "sm80", tmp_path / masters), torch.device("cuda"), stack)
            ends[masters] = ([step for _ in range(8) for step in run.advance()] + run.settle())[-1].loss
        torch.compiler.reset()
    assert ends["bf16"] == pytest.approx(ends["f32"], rel=0.02)
