"""The trainer: its updates against float64, exact resumption, and what stops it."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import WINDOW, Toy, stream, train_spec, trainer

from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.metrics.validation import Validation
from specc.runtime.storage import checkpoint
from specc.runtime.storage.checkpoint import Snapshot
from specc.runtime.train.sources.micro_batches import BatchError, micro_batches
from specc.runtime.train.trainer import WARM_UP_STEPS, Trainer


def steps(run_trainer: Trainer, count: int) -> list[float]:
    return [step.loss for _ in range(count) for step in run_trainer.advance()]


def values(snapshot: Snapshot) -> dict[str, Tensor]:
    groups = {
        "weights": snapshot.weights,
        "average": snapshot.average or {},
        "optimizer": snapshot.optimizer,
        "rng": snapshot.rng,
    }
    return {f"{group}/{name}": t.detach().clone() for group, tensors in groups.items() for name, t in tensors.items()}


def equal(snapshot: Snapshot, other: dict[str, Tensor]) -> bool:
    tensors = values(snapshot)
    return tensors.keys() == other.keys() and all(torch.equal(tensors[name], other[name]) for name in tensors)


def orthogonal(matrix: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_updates_are_the_spec_in_float64(tmp_path: Path) -> None:
    """Accumulation, clipping, schedule, ramped Muon, AdamW, decay and average, written out once more."""
    train = train_spec(tokens_per_step=6 * WINDOW)
    result = trainer(tmp_path, train, Toy(noise=0.0))
    model = Toy(noise=0.0).double()
    model.logits = lambda ids, noise: _logits(model, ids)  # type: ignore[method-assign]
    named = dict(model.named_parameters())
    adam = torch.optim.AdamW(
        [
            {"params": [named["embed"]], "weight_decay": 0.1},
            {"params": [named["blocks.gain"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    buffers = {name: torch.zeros_like(named[name]) for name in ("blocks.up", "blocks.down")}
    average = {name: param.detach().clone() for name, param in named.items()}
    loader = Loader(stream(tmp_path), 2, WINDOW, "coprime_stride", train.seed)
    for step in range(8):
        (known,) = result.advance()
        model.zero_grad()
        losses = [model(*loader.next()) for _ in range(3)]
        loss = torch.stack(losses).mean()
        loss.backward()
        grads = {name: param.grad for name, param in named.items() if param.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for grad in grads.values():
            grad *= min(1.0, 0.5 / (norm + 1e-6))
        rate = min((step + 1) / 3, 1.0, max((20 - step) / 10, 0.1))
        momentum = 0.8 + 0.15 * min(1.0, step / 10)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.mul_(momentum).add_(grads[name])
                rows, columns = named[name].shape
                direction = orthogonal(grads[name] + momentum * buffer)
                named[name].mul_(1 - 0.02 * rate * 0.01)
                named[name].sub_(0.02 * rate * math.sqrt(max(1, rows / columns)) * direction)
            for group, lr in zip(adam.param_groups, (0.02, 0.01), strict=True):
                group["lr"] = lr * rate
            adam.step()
            for name, param in named.items():
                average[name].mul_(0.9).add_(param, alpha=0.1)
        assert known.step == step + 1 and known.lr == pytest.approx(rate)
        assert known.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert known.grad_norm == pytest.approx(norm, rel=1e-4)
    loader.close()
    snapshot = result.snapshot()
    assert snapshot.average is not None
    for name, param in named.items():
        torch.testing.assert_close(snapshot.weights[name].detach().double(), param.detach(), rtol=0, atol=2e-4)
        torch.testing.assert_close(snapshot.average[name].double(), average[name], rtol=0, atol=2e-4)


def _logits(model: Toy, ids: Tensor) -> Tensor:
    x = model.embed[ids]
    h = torch.relu(x @ model.blocks.up.T) @ model.blocks.down.T
    return (x + model.blocks.gain * h) @ model.embed.T


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_resuming_anywhere_is_exact(tmp_path: Path, dtype: str) -> None:
    whole = trainer(tmp_path, dtype=dtype)
    losses = steps(whole, 20)
    end = values(whole.snapshot())
    assert len(set(losses)) == 20
    draw = random.Random(3)
    for stop in [1, *draw.sample(range(2, 19), 5), 19]:
        first = trainer(tmp_path, dtype=dtype)
        steps(first, stop)
        path = checkpoint.save(tmp_path / f"stop{stop}", first.snapshot())
        torch.manual_seed(999)
        second = trainer(tmp_path, dtype=dtype)
        second.restore(checkpoint.load(path))
        assert second.step == stop
        assert steps(second, 20 - stop) == losses[stop:]
        assert equal(second.snapshot(), end)


def test_each_part_of_the_state_matters(tmp_path: Path) -> None:
    """So that the test above could fail: without any one part the next losses differ."""
    whole = trainer(tmp_path)
    losses = steps(whole, 20)
    half = trainer(tmp_path)
    steps(half, 10)
    saved = checkpoint.load(checkpoint.save(tmp_path / "c", half.snapshot()))
    fresh = trainer(tmp_path).snapshot()
    for part in ("weights", "optimizer", "rng", "loader", "step"):
        other = trainer(tmp_path)
        fields = {name: getattr(saved, name) for name in Snapshot.__slots__}
        other.restore(Snapshot(**{**fields, part: getattr(fresh, part)}))
        assert steps(other, 10) != losses[10:], part


def test_bf16_trains_on_f32_masters(tmp_path: Path) -> None:
    low, high = (trainer(tmp_path, model=Toy(noise=0.0), dtype=dtype) for dtype in ("bf16", "f32"))
    assert steps(low, 20) == pytest.approx(steps(high, 20), rel=0.03)
    copies = dict(low.masters.model_parameters)
    for name, master in low.masters.tensors.items():
        assert master.dtype == torch.float32 and copies[name].dtype == torch.bfloat16
        assert torch.equal(copies[name].detach(), master.detach().bfloat16())
        assert not torch.equal(copies[name].detach().float(), master.detach())


def test_micro_batches_make_the_same_step(tmp_path: Path) -> None:
    many, whole = (
        trainer(tmp_path, train_spec(micro_batch=size, tokens_per_step=4 * WINDOW), Toy(noise=0.0)) for size in (1, 4)
    )
    assert (many.micro_batches, whole.micro_batches) == (4, 1)
    assert steps(many, 10) == pytest.approx(steps(whole, 10), rel=1e-4)


@pytest.mark.parametrize(("tokens", "hint"), [(100, "64 or 128"), (63, "use 64,")])
def test_a_batch_that_does_not_come_out_even_says_the_numbers(tokens: int, hint: str) -> None:
    with pytest.raises(BatchError) as caught:
        micro_batches(train_spec(micro_batch=2, tokens_per_step=tokens), 32)
    assert f"tokens_per_step {tokens} is not a multiple of micro_batch 2 x 32 tokens = 64" in caught.value.message
    assert hint in caught.value.hint and caught.value.exit_code == 2
    with pytest.raises(BatchError, match="x 2 processes = 128"):
        micro_batches(train_spec(micro_batch=2, tokens_per_step=64), 32, world=2)
    assert micro_batches(train_spec(micro_batch=2, tokens_per_step=384), 32, world=2) == 3


def spoiled(place: str, value: float) -> Callable[[Toy], None]:
    def spoil(model: Toy) -> None:
        if place == "loss":
            model.spoil = lambda loss: loss * value
        else:
            param = dict(model.named_parameters())[place]
            param.register_hook(lambda grad: torch.full_like(grad, value))

    return spoil


PLACES = ["loss", "embed", "blocks.up", "blocks.down", "blocks.gain"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stops_within_the_step(tmp_path: Path, place: str, value: float) -> None:
    model = Toy()
    run_trainer = trainer(tmp_path, model=model)
    steps(run_trainer, 4)
    before = values(run_trainer.snapshot())
    spoiled(place, value)(model)
    with pytest.raises(RunFailure) as caught:
        run_trainer.advance()
    assert caught.value.exit_code == 4 and "step 5: " in caught.value.message
    if place != "loss":
        assert f"the first parameter with NaN or infinity is {place}" in caught.value.message
    after = values(run_trainer.snapshot())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["rng/cpu"]  # neither weights nor their average nor the optimizer were touched


def test_warming_up_leaves_no_trace(tmp_path: Path) -> None:
    warm, cold = trainer(tmp_path), trainer(tmp_path)
    steps(warm, 3)
    before, place = values(warm.snapshot()), warm.loader.state()
    warm.warm_up(257)
    assert equal(warm.snapshot(), before) and warm.loader.state() == place and warm.step == 3
    torch.manual_seed(train_spec().seed)  # the toy's noise is global: start the other where the first began
    whole = steps(cold, 8)
    warm.restore(_at(cold, tmp_path, 3))
    warm.warm_up(257)
    assert steps(warm, 5) == whole[3:]


def test_steps_of_a_warm_up_have_one_micro_batch(tmp_path: Path) -> None:
    model, calls = Toy(), list[object]()
    model.register_forward_hook(lambda *call: calls.append(call))
    run = trainer(tmp_path, train_spec(micro_batch=1, tokens_per_step=4 * WINDOW), model)
    run.warm_up(257)
    assert len(calls) == WARM_UP_STEPS * len(run._steps_of_each_work())
    calls.clear()
    steps(run, 1)
    assert len(calls) == run.micro_batches == 4


def _at(like: Trainer, folder: Path, step: int) -> Snapshot:
    torch.manual_seed(like.train.seed)
    other = trainer(folder)
    steps(other, step)
    return checkpoint.load(checkpoint.save(folder / "at", other.snapshot()))


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    run_trainer = trainer(tmp_path)
    steps(run_trainer, 2)
    saved = checkpoint.load(checkpoint.save(tmp_path / "c", run_trainer.snapshot()))
    fields: dict[str, Any] = {name: getattr(saved, name) for name in Snapshot.__slots__}
    wrong = {
        "spec_digest": ("other", "another spec"),
        "weights": ({**saved.weights, "extra": torch.zeros(1)}, "model does not fit.*extra is unknown"),
        "optimizer": ({}, "optimizer does not fit.*it has no muon.momentum/blocks.up"),
        "average": (None, "average does not fit"),
        "rng": ({"cpu": torch.zeros(3)}, "generators"),
    }
    target = trainer(tmp_path)
    before = values(target.snapshot())
    for part, (value, message) in wrong.items():
        with pytest.raises(IntegrityError, match=message):
            target.restore(Snapshot(**{**fields, part: value}))
        assert equal(target.snapshot(), before) and target.step == 0


def test_validation_scores_the_weights_that_it_is_given(tmp_path: Path) -> None:
    run_trainer = trainer(tmp_path)
    steps(run_trainer, 12)
    val = stream(tmp_path, "val")
    assert run_trainer.average is not None
    before = values(run_trainer.snapshot())
    for weights in (run_trainer.masters.tensors, run_trainer.average.tensors):
        lone = Toy()
        lone.load_state_dict({name: tensor.detach() for name, tensor in weights.items()})
        tokens = torch.from_numpy(val.read(0, val.tokens).astype("int64"))
        with torch.no_grad():
            expected = sum(float(lone.score(tokens[i : i + 1, None], tokens[i + 1 : i + 2, None])) for i in range(400))
        result = run_trainer.evaluate(Validation(val, ByteTokenizer(), 3, 400), weights)
        assert result.tokens == 400 and result.nats == pytest.approx(expected, rel=1e-5)
    raw = run_trainer.evaluate(Validation(val, ByteTokenizer(), 3, 400))
    assert (
        raw.nats
        == run_trainer.evaluate(Validation(val, ByteTokenizer(), 3, 400), run_trainer.masters.tensors).nats
        != result.nats
    )
    assert equal(run_trainer.snapshot(), before)


def test_validation_that_is_not_finite_stops(tmp_path: Path) -> None:
    run_trainer = trainer(tmp_path)
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in run_trainer.masters.tensors.items()}
    with pytest.raises(RunFailure, match="validation loss is nan"):
        run_trainer.evaluate(Validation(stream(tmp_path, "val"), ByteTokenizer(), 2, 50), broken)
