"""Depth recurrence that begins part-way through training: two programs over one table of parameters, the switch, and
what a run is scored with that ends on either side of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golf_models import spec_of
from plain_golf import Plain, at, copied, place
from run_samples import small_spec, write_text
from tiny_models import float64
from torch import Tensor

from specc.compiler.architectures.decoder import OrderSchedule
from specc.compiler.spec.spec import Spec
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.model.load import instantiate
from specc.runtime.open_model import open_model
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint
from specc.runtime.storage.checkpoint import Snapshot
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.loop import TrainResult
from specc.runtime.train.train import TrainOptions, train

LOOPED = (
    "train.steps=6",
    "model.blocks.count=4",
    "model.blocks.order={at: [[0, 0..3], [0.5, 0..2 1..2 1..2 3]]}",
    "model.blocks.between=[{name: skips, where: run // (runs // 2) == 1, learn: {scale: {init: 1}}, "
    "read: x + scale * output(2 * (runs // 2) - 1 - run)}]",
    'quant.rules.1.match="*.{residual,q_gain,scale}"',
    "train.optimizers.1.weight_decay=0.5",
)


def looped(p: Plain, after: float) -> Any:
    """The spec of `p`, whose loop begins late."""
    spec = spec_of(p)
    once = f"0..{p.count - 1}"
    order = OrderSchedule(at=((0, once), (after, spec.model.blocks.order)))
    blocks = spec.model.blocks.model_copy(update={"order": order})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"blocks": blocks})})


def fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.7 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("skips", ["additive", "lerp", ""])
def test_both_programs_equal_their_plain_models(skips: str, fuse: bool, tmp_path: Path) -> None:
    p = Plain(order=(0, 1, 2, 1, 2, 1, 2, 3, 4), skips=skips)
    loaded = instantiate(looped(p, 0.35), "cpu", tmp_path, fuse)
    model: Any = loaded.model.double()
    (phase,) = loaded.programs.phases
    assert (phase.until, phase.train, phase.score) == (0.35, "train_once", "score_once")
    fill(model, 3)
    ids, targets = torch.randint(p.vocab, (2, 2, p.context), generator=torch.Generator().manual_seed(5))
    for plan, run, score, rests in (
        (replace(p, order=()), model.train_once, model.score_once, phase.rests),
        (p, model, model.score, ()),
    ):
        model.zero_grad()
        learned = {name: value for name, value in model.named_parameters() if name not in rests}
        with float64():
            plain = copied(plan, learned)
            loss, want = run(ids, targets), plain(ids, targets)
            torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6, check_dtype=False)
            torch.testing.assert_close(score(ids, targets).mean(), want, rtol=1e-5, atol=1e-6, check_dtype=False)
            loss.backward()
            want.backward()
        gradients = {key: value.grad for key, value in plain.named_parameters()}
        for key, parameter in learned.items():
            gradient = at(gradients, place(key, p.count), parameter.shape)  # type: ignore[arg-type]
            scale = float(gradient.abs().max())
            assert scale > 0, key
            torch.testing.assert_close(parameter.grad, gradient, rtol=2e-4, atol=2e-5 * scale, msg=key)
        assert all(model.get_parameter(name).grad is None for name in rests)
    assert len(phase.rests) == {"additive": 2, "lerp": 4, "": 0}[skips]


def trained(folder: Path, spec: Spec, data: str, stop: int | None = None, resume: bool = False) -> TrainResult:
    options = TrainOptions(spec, "cpu", data, folder, resume="auto" if resume else None, stop_after_steps=stop)
    return train(options, lambda line: None)


def saved(result: TrainResult) -> Snapshot:
    return checkpoint.load(result.checkpoint)


def test_a_run_resumed_on_either_side_of_the_switch_ends_the_same(tmp_path: Path) -> None:
    spec, data = small_spec(*LOOPED), str(write_text(tmp_path / "data"))
    whole = trained(tmp_path / "whole", spec, data)
    want = saved(whole)
    for stop in (2, 3, 4):
        folder = tmp_path / f"stop{stop}"
        early = trained(folder, spec, data, stop)
        assert saved(early).done == (stop - 1) / 6
        assert trained(folder, spec, data, resume=True).raw.record() == whole.raw.record()
        output = saved(trained(folder, spec, data, resume=True))
        assert (output.step, output.done) == (6, 5 / 6)
        for name, tensor in (*want.weights.items(), *want.optimizer.items()):
            assert torch.equal({**output.weights, **output.optimizer}[name], tensor), (stop, name)


def test_the_switch_changes_what_is_trained_and_parameters_rest_before_it(tmp_path: Path) -> None:
    data = str(write_text(tmp_path / "data"))
    at_start = small_spec(*LOOPED, "model.blocks.order=0..2 1..2 1..2 3")
    late, never = small_spec(*LOOPED), small_spec(*LOOPED, "model.blocks.order=0..3")
    before = saved(trained(tmp_path / "late", late, data, 3))
    alike = saved(trained(tmp_path / "never", never, data, 3))
    other = saved(trained(tmp_path / "start", at_start, data, 3))
    rests = sorted(before.weights.keys() - alike.weights.keys())
    assert rests == ["skips.2.scale", "skips.3.scale"]
    for name, tensor in alike.weights.items():  # until the switch it is the model without a loop, to the bit
        assert torch.equal(before.weights[name], tensor), name
    assert not torch.equal(before.weights["blocks.1.mlp.up"], other.weights["blocks.1.mlp.up"])
    for name in rests:  # nothing reads them: no weight decay, no step counted, no average moved
        assert torch.equal(before.weights[name], torch.ones_like(before.weights[name]))
        assert before.average is None or torch.equal(before.average[name], before.weights[name])
        state = {key: value for key, value in before.optimizer.items() if key.endswith(f"/{name}")}
        assert state and all(not value.any() for value in state.values())
    after = saved(trained(tmp_path / "late", late, data, 4, resume=True))
    for name in rests:
        assert not torch.equal(after.weights[name], before.weights[name])
        assert float(after.optimizer[f"adamw.step/{name}"]) == 1


def nats(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        return model.score(ids, targets).double()  # type: ignore[no-any-return]


def test_a_run_is_scored_with_the_model_that_it_trained(tmp_path: Path) -> None:
    spec, data = small_spec(*LOOPED), str(write_text(tmp_path / "data"))
    folder, scored = tmp_path / "run", EvaluateOptions(cache=tmp_path / "cache", max_tokens=400)
    ids, targets = torch.randint(257, (2, 2, 32), generator=torch.Generator().manual_seed(4))
    result = trained(folder, spec, data, 3)
    said: list[str] = []
    opened = open_model(folder, say=said.append)
    assert opened.spec.model.blocks.order == "0..3" and any("ended before the last phase" in line for line in said)  # type: ignore[attr-defined]
    assert evaluate(folder, EvaluateOptions(cache=tmp_path / "cache")).nats == pytest.approx(result.final.nats)
    full: Any = instantiate(spec, "cpu", tmp_path / "full").model
    weights = saved(result).average or saved(result).weights
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            parameter.copy_(weights[name])
        torch.testing.assert_close(nats(opened.model, ids, targets), full.score_once(ids, targets).double())
        assert float((nats(opened.model, ids, targets) - full.score(ids, targets)).abs().max()) > 1e-4
    model: Any = opened.model  # cached decoding is of the same model
    cache = model.new_cache(2, 32)
    assert len(cache) == 4
    quantized = quantize(folder, QuantizeOptions(cache=tmp_path / "cache", max_tokens=400), lambda line: None)
    artifact = open_model(quantized.artifact)
    assert artifact.spec.model.blocks.order == "0..3"  # type: ignore[attr-defined]
    assert evaluate(quantized.artifact, replace(scored, data=data), search=[folder]).nats == quantized.after.nats  # type: ignore[union-attr]
    trained(folder, spec, data, 4, resume=True)
    looping = open_model(folder, say=said.append)
    assert looping.spec == Run.open(folder).spec and len(looping.text_model.new_cache(2, 32)) == 8
