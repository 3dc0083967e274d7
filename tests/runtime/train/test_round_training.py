"""Training programs that round as int8 will: the values of the deployed model, gradients, causality, weights."""

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import BLOCKS, BY_FEATURE, LSTM, QUANT, WIDE, Int8Models, data_of, lines, quantized_model
from tiny_models import spec_of
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.int8.fake_quantize import rounded
from specc.compiler.ops.rounded import RoundRows
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.programs import fx_witness as witness
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Programs
from specc.compiler.quant.scheme import Seen
from specc.compiler.spec.learning_rate import ScheduleSpec
from specc.compiler.spec.train import QatSpec
from specc.runtime.artifact.quantized_model import dequantized
from specc.runtime.model.load import instantiate
from specc.runtime.optim.masters import Masters
from specc.runtime.train.sources.feed import shifted

TWO_BIASES = {
    **LSTM,
    "encoder": [LSTM["encoder"][0], {**LSTM["encoder"][1], "biases": 2}],
    "decoder": [*LSTM["decoder"][:4], {"kind": "lstm", "hidden": 16, "biases": 2}],
}
BACKWARD = {
    **LSTM,
    "encoder": [LSTM["encoder"][0], {"kind": "lstm", "hidden": 16, "directions": "backward"}],
    "bridge": {"kind": "linear"},
}
MODELS = {"lstm": LSTM, "two biases": TWO_BIASES, "backward": BACKWARD, "blocks": BLOCKS}
QUANTS = {"one scale": QUANT, "by feature": BY_FEATURE, "16 bits": WIDE}
CASES = [*((name, "by feature") for name in MODELS), ("lstm", "one scale"), ("lstm", "16 bits"), ("blocks", "16 bits")]


@cache
def model(name: str, quant: str) -> Int8Models:
    return quantized_model(spec_of(data_of(MODELS[name], QUANTS[quant])), uneven=1.0)


def scales_of(models: Int8Models) -> dict[str, Tensor]:
    """By buffer."""
    widths = {f"{s.leader}_inverse": models.stored.shapes[s.leader][1] for s in models.sources}
    results = {f"{s.leader}_inverse": models.stored.tensors[s.leader]["input_scale"] for s in models.sources}
    return {name: (1 / torch.from_numpy(scale.copy())).expand(widths[name]) for name, scale in results.items()}


def rounds(models: Int8Models, name: str) -> Programs:
    """With a program NAME_rounded."""
    programs = pipeline.lower(models.spec, "cpu")
    return rounded(programs, allocation(models.spec.quant, programs.params), (name,))


def exact(models: Int8Models, masters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Weights and buffers in float64."""
    return {
        name: tensor.double()
        for name, tensor in {**(masters or dequantized(models.stored)), **scales_of(models)}.items()
    }


def trained(models: Int8Models, folder: Path, **more: Any) -> torch.nn.Module:
    """The generated training module, with the values that the artifact's codes stand for."""
    rounding = {"qat": QatSpec(), "schedule": ScheduleSpec(warmdown_fraction=1.0), "steps": 10, **more}
    spec = models.spec.model_copy(update={"train": models.spec.train.model_copy(update=rounding)})
    loaded = instantiate(spec, "cpu", folder)
    with torch.no_grad():
        for name, tensor in {**dequantized(models.stored), **scales_of(models)}.items():
            (loaded.model.get_parameter if name in models.weights else loaded.model.get_buffer)(name).copy_(tensor)
    return loaded.model


@pytest.mark.parametrize(("name", "quant"), CASES)
def test_it_computes_what_the_deployed_model_computes(name: str, quant: str, tmp_path: Path) -> None:
    """Nats of every token: by the references in float64, whose rounding is far below that of codes, but where a value
    lies between two codes. Without the rounding they are further off by orders; of 16 bits, that of f32 is in sight."""
    models = model(name, quant)
    source, target = lines(1, 64)
    real = target != 0
    batch = {"source": source, "target": target}
    with torch.no_grad():
        wanted: Any = models.whole.score(source, target)  # type: ignore[operator]
        result = reference.run(rounds(models, "score"), "score_rounded", batch, exact(models))["loss"]
        plain = reference.run(rounds(models, "score"), "score", batch, exact(models))["loss"]
        mean = trained(models, tmp_path).train_rounded(source, shifted(target), target)  # type: ignore[operator]
    difference, without = ((other - wanted)[real].abs() for other in (result, plain))
    assert float(difference.median()) < max(0.01 * float(without.median()), 4e-7)  # nats, of f32
    assert float(difference.mean()) < max(0.05 * float(without.mean()), 4e-6)  # a value between two codes
    assert float((mean - wanted[real].mean()).abs()) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_without_the_rounding_it_is_the_plain_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient, in float64: the loops and products it is taken apart into are those of the model."""
    models = model(name, "by feature")
    monkeypatch.setattr(RoundRows, "reference", lambda self, x, inverse: x)
    source, target = lines(3, 8)
    batch = {"source": source, "inputs": shifted(target), "target": target}
    results = []
    for program in ("train", "train_rounded"):
        weights = exact(models)
        for key in models.weights:
            weights[key].requires_grad_()
        loss = reference.run(rounds(models, "train"), program, batch, weights)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        results.append([loss.detach(), *(weights[key].grad for key in models.weights)])
    for value, yours in zip(*results, strict=True):
        torch.testing.assert_close(value, yours, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "quant"), CASES)
def test_gradients_are_those_of_the_straight_through_estimator(name: str, quant: str, tmp_path: Path) -> None:
    """Every parameter has one, and it is that of the references in float64."""
    models = model(name, quant)
    source, target = lines(4, 16)
    batch = {"source": source, "inputs": shifted(target), "target": target}
    weights = exact(models)
    for key in models.weights:
        weights[key].requires_grad_()
    reference.run(rounds(models, "train"), "train_rounded", batch, weights)["loss"].backward()  # type: ignore[no-untyped-call]
    generated = trained(models, tmp_path).double()
    generated.train_rounded(*batch.values()).backward()  # type: ignore[operator]
    for key, parameter in generated.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, key
        torch.testing.assert_close(parameter.grad, weights[key].grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["lstm", "two biases", "backward", "blocks"])
def test_what_it_writes_is_what_it_is_trained_to_write(name: str, tmp_path: Path) -> None:
    """Token by token the loss is that of whole lines, rounded alike, and not that of the plain programs."""
    module: Any = trained(model(name, "by feature"), tmp_path, teacher_forcing=0.5)
    source, target = lines(6, 32)
    inputs, real = shifted(target), target != 0
    with torch.no_grad():
        wanted = float(module.train_rounded(source, inputs, target))
        results = []
        for encode, extend in ((module.encode_rounded, module.extend_rounded), (module.encode, module.extend)):
            state = encode(source)
            logits = [extend(inputs[:, t : t + 1], torch.tensor(t), state) for t in range(target.shape[1])]
            nats = torch.nn.functional.cross_entropy(torch.stack(logits, 1)[real], target[real])
            results.append(abs(float(nats) - wanted))
    assert results[0] < 2e-5 and results[0] < 0.1 * results[1]


def test_beyond_the_largest_code_nothing_is_learned() -> None:
    """It is cut off there; within, the gradient is that of x itself, and the value is on the grid."""
    x = torch.tensor([[-300.0, -127.0, -3.5, -0.4, 0.5, 1.5, 126.6, 128.0]], requires_grad=True)
    y = RoundRows().reference(x, torch.full((8,), 1.0))
    assert isinstance(y, Tensor)
    y.backward(torch.arange(1.0, 9.0)[None])
    assert y.tolist() == [[-127.0, -127.0, -4.0, 0.0, 0.0, 2.0, 127.0, 127.0]]
    assert x.grad is not None and x.grad.tolist() == [[0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0]]


def test_with_16_bits_too_and_the_grid_is_finer() -> None:
    x = torch.tensor([[-300.0, -127.0, -3.5, 0.25, 1 / 254, 126.6, 128.0, 0.0]], requires_grad=True)
    y = RoundRows(16).reference(x, torch.full((8,), 1.0))
    assert isinstance(y, Tensor)
    y.backward(torch.arange(1.0, 9.0)[None])
    codes = 254 * y.detach()
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=4e-3)
    within = x.detach().clamp(-127, 127)
    assert float((y.detach() - within).abs().max()) < 0.51 / 254
    assert x.grad is not None and x.grad.tolist() == [[0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 8.0]]


@pytest.mark.parametrize("name", ["lstm", "blocks"])
def test_a_token_learns_nothing_from_those_behind_it(name: str, tmp_path: Path) -> None:
    """The loss of the first 5 targets does not read what the decoder is fed later; that of all does."""
    module: Any = trained(model(name, "by feature"), tmp_path)
    source, target = lines(5, 16)
    inputs, other = shifted(target), shifted(target)
    other[:, 5:] = torch.randint(3, 31, other[:, 5:].shape, generator=torch.Generator().manual_seed(1))
    first = torch.where(torch.arange(30) < 5, target, 0)
    with torch.no_grad():
        assert torch.equal(module.train_rounded(source, inputs, first), module.train_rounded(source, other, first))
        assert not torch.equal(
            module.train_rounded(source, inputs, target), module.train_rounded(source, other, target)
        )


def test_the_generated_program_is_the_plan(tmp_path: Path) -> None:
    models = model("lstm", "by feature")
    module = trained(models, tmp_path)
    graph = witness.trace(module, sys.modules[type(module).__module__], "train_rounded")
    assert witness.round_trip(rounds(models, "train"), "train_rounded", graph) > 40


def test_weights_are_rounded_as_the_artifact_stores_them() -> None:
    """Times the shares of their inputs' scales."""
    models = model("lstm", "by feature")
    copies = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in models.weights.items()}
    holder = torch.nn.Module()
    for name, parameter in copies.items():
        holder.register_parameter(name.replace(".", "_"), parameter)
    schemes = {name.replace(".", "_"): scheme for name, scheme in models.stored.schemes.items()}
    masters = Masters(holder, dict.fromkeys(schemes, torch.float32), copied=schemes.keys())
    shares = {}
    for source in models.sources:
        scale = torch.from_numpy(models.stored.tensors[source.weight]["input_scale"].copy())
        shares[source.weight.replace(".", "_")] = (scale.double() / scale.double().max()).float()
    masters.fake_quantize(schemes, shares)
    for source in models.sources:
        name, scheme = source.weight, models.stored.schemes[source.weight]
        scale = torch.from_numpy(models.stored.tensors[name]["input_scale"].copy())
        arrays = scheme.quantize_seen(models.weights[name], Seen(input_scale=scale))  # without data: to nearest
        result = masters.model_parameters[name.replace(".", "_")].detach()
        wanted = scheme.dequantize(arrays, tuple(result.shape))
        step = torch.from_numpy(arrays["scale"].copy()).float()[:, None]
        steps = ((result - wanted) * shares[name.replace(".", "_")] / step).abs()
        assert float((steps > 1e-3).float().mean()) < 1e-3 and not torch.equal(result, models.weights[name])
