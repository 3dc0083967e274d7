"""Work that begins late in a run: the plain mean of the weights, and rounding them as they will be stored."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import read_log
from run_samples import small_spec, write_text
from test_train_steps import equal, steps, values
from torch import Tensor, nn
from torch.nn import functional as F
from toy import SHAPES, Toy, train_spec, trainer

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.int8 import Int8
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme, Seen
from specc.compiler.spec.train import SwaSpec
from specc.runtime.optim.average import Average
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.schedule import Moment
from specc.runtime.storage import checkpoint
from specc.runtime.train.train import TrainOptions
from specc.runtime.train.train import train as whole_run

SCHEMES: dict[str, Scheme] = {
    "embed": Round(bits=8, clip=0.9),
    "blocks.up": Gptq(bits=5),
    "blocks.down": Gptq(bits=5),
    "blocks.gain": Unquantized(dtype="f16"),
}
SCHEDULE = {"warmdown_steps": 10}


def stored(name: str, weight: Tensor) -> Tensor:
    """A weight that is rounded to nearest, as an artifact returns it."""
    scheme = SCHEMES[name] if name == "embed" else Round(bits=5)
    shape = tuple(weight.shape)
    return scheme.dequantize(scheme.quantize(weight.detach(), None), shape)


# The plain mean


def test_swa_is_the_mean_of_what_it_took() -> None:
    weights = {"w": nn.Parameter(torch.zeros(5))}
    average = Average(SwaSpec(kind="swa", every=3, below=0.5), lambda: weights)
    taken = []
    for step in range(1, 31):
        with torch.no_grad():
            weights["w"].copy_(torch.randn(5, generator=torch.Generator().manual_seed(step)))
        average.update(step, Moment(warm_down=1 - step / 30))
        if step % 3 == 0 and step > 15:
            taken.append(weights["w"].detach().double().clone())
        wanted = torch.stack(taken).mean(0) if taken else weights["w"].detach().double()
        torch.testing.assert_close(average.tensors["w"].double(), wanted, rtol=1e-5, atol=1e-6)
    assert len(taken) == 5 and float(average.state()["swa.count"]) == 5


@pytest.mark.parametrize("stop", [4, 13, 16, 19])
def test_a_run_with_swa_resumes_exactly(tmp_path: Path, stop: int) -> None:
    train = train_spec(average={"kind": "swa", "every": 2, "below": 0.65}, schedule=SCHEDULE)
    whole, first = (trainer(tmp_path, train, Toy(noise=0.0)) for _ in range(2))
    steps(whole, 20)
    steps(first, stop)
    second = trainer(tmp_path, train, Toy(noise=0.0))
    second.restore(checkpoint.load(checkpoint.save(tmp_path / "saved", first.snapshot())))
    steps(second, 20 - stop)
    end = values(whole.snapshot())
    assert equal(second.snapshot(), end) and end["optimizer/swa.count"] == 3
    assert any(not torch.equal(end[f"average/{name}"], end[f"weights/{name}"]) for name in SHAPES)


def test_a_mean_that_never_began_is_not_called_one(tmp_path: Path) -> None:
    """A run that ends before its warm-down ends with the weights as they are, and says so."""
    wishes = "train.average={kind: swa, every: 1, below: 0.8}", "train.schedule={warmdown_steps: 2}"
    data, output = str(write_text(tmp_path / "data")), {}
    for count in (1, 3):
        said: list[str] = []
        options = TrainOptions(small_spec(*wishes), "cpu", data, tmp_path / str(count), stop_after_steps=count)
        result = whole_run(options, said.append)
        end = [record for record in read_log(result.run / "log.jsonl") if record["event"] == "end"]
        output[count] = (
            result.averaged is not None,
            end[-1]["weights"],
            any("before the average began" in line for line in said),
        )
    assert output == {1: (False, "raw", True), 3: (True, "average", False)}


# Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_computes_with_what_will_be_stored(dtype: torch.dtype) -> None:
    model = Toy(noise=0.0)
    masters = Masters(model, dict.fromkeys(SHAPES, dtype), copied=SCHEMES)
    weights = {name: master.detach().clone() for name, master in masters.tensors.items()}
    masters.fake_quantize(SCHEMES)
    for name, param in model.named_parameters():
        if name == "blocks.gain":
            assert torch.equal(param.detach(), weights[name].to(dtype))
            continue
        assert torch.equal(param.detach(), stored(name, weights[name]).to(dtype)), name
        assert not torch.equal(param.detach(), weights[name].to(dtype))
        bits = 8 if name == "embed" else 5
        assert all(len(row.unique()) <= 2**bits - 1 for row in param.detach())
        assert torch.equal(masters.tensors[name].detach(), weights[name])
    masters.fake_quantize(None)
    assert all(torch.equal(param.detach(), weights[name].to(dtype)) for name, param in model.named_parameters())


@pytest.mark.parametrize("weights", ["per_channel", "per_tensor"])
def test_int8_weights_are_those_of_their_products_and_biases_stay(weights: str) -> None:
    """Two of one shape and unlike sizes are rounded together, each by its own numbers."""
    scheme = Int8.model_validate({"weights": weights})
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(2, 6, 10, generator=generator)
    drawn[0, 1] = 1e-6  # a row far below the others has their step
    module = nn.ParameterDict({"a": drawn[0].clone(), "b": 100 * drawn[1], "bias": torch.randn(6, generator=generator)})
    given = {name: param.detach().clone() for name, param in module.items()}
    masters = Masters(module, dict.fromkeys(module, torch.float32), copied=module.keys())
    masters.fake_quantize(dict.fromkeys(module, scheme))
    for name in ("a", "b"):
        arrays = scheme.quantize_seen(given[name], Seen(input_scale=torch.tensor([3.0 / 127])))
        assert torch.equal(module[name].detach(), scheme.dequantize(arrays, (6, 10)))
        assert not torch.equal(module[name].detach(), given[name])
    assert torch.equal(module["bias"].detach(), given["bias"])


def test_gradients_pass_as_if_nothing_were_rounded() -> None:
    """They are those of the loss at the rounded weights, in float64 by another way: autograd through
    w + (rounded - w).detach()."""
    model = Toy(noise=0.0)
    masters = Masters(model, dict.fromkeys(SHAPES, torch.float32), copied=SCHEMES)
    masters.fake_quantize(SCHEMES)
    ids, targets = torch.randint(257, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    masters.clear()
    torch.autograd.backward(model(ids, targets))
    masters.collect()
    masters.finish(1, None)
    leaves = {name: master.detach().double().requires_grad_() for name, master in masters.tensors.items()}
    rounded = {
        name: leaf + (stored(name, leaf).double() - leaf).detach() if name != "blocks.gain" else leaf
        for name, leaf in leaves.items()
    }
    x = rounded["embed"][ids]
    h = torch.relu(x @ rounded["blocks.up"].T) @ rounded["blocks.down"].T
    logits = (x + rounded["blocks.gain"] * h) @ rounded["embed"].T
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for leaf, grad in zip(leaves.values(), masters.gradients, strict=True):
        assert leaf.grad is not None and float(leaf.grad.abs().max()) > 0
        torch.testing.assert_close(grad.double(), leaf.grad, rtol=1e-4, atol=1e-6)


def test_what_is_less_than_a_step_of_the_grid_adds_up() -> None:
    model = Toy(noise=0.0)
    masters = Masters(model, dict.fromkeys(SHAPES, torch.float32), copied=SCHEMES)
    masters.fake_quantize(SCHEMES)
    before = model.blocks.up.detach().clone()
    grid = before[0].abs()[before[0] != 0].min()
    with torch.no_grad():
        changes = 0
        for _ in range(64):
            masters.tensors["blocks.up"][0, 1] += grid / 16
            masters.refresh()
            changes += not torch.equal(model.blocks.up.detach(), before)
    assert 8 < changes < 64  # not at once, but in the end


def run(folder: Path, below: float = 0.55, **more: Any) -> Any:
    return trainer(folder, train_spec(qat={"below": below}, schedule=SCHEDULE), Toy(noise=0.0), grids=SCHEMES, **more)


def shown(run_trainer: Any) -> Mapping[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run_trainer.masters.model_parameters.items()}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_run_begins_to_round_when_its_spec_says(tmp_path: Path, dtype: str) -> None:
    """The multiplier is below 0.55 from the step after 15 on; before it the run is the one without."""
    late, plain = run(tmp_path, dtype=dtype), trainer(tmp_path, train_spec(schedule=SCHEDULE), Toy(0.0), dtype)
    assert steps(late, 15) == steps(plain, 15)
    up = late.masters.tensors["blocks.up"]
    assert torch.equal(shown(late)["blocks.up"], up.detach().to(shown(late)["blocks.up"].dtype))
    (late_loss,), (plain_loss,) = steps(late, 1), steps(plain, 1)
    assert late_loss != plain_loss
    for _ in range(4):
        up = late.masters.tensors["blocks.up"]
        result = shown(late)["blocks.up"]
        assert torch.equal(result, stored("blocks.up", up).to(result.dtype)) and not torch.equal(result.float(), up)
        steps(late, 1)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("stop", [3, 15, 16, 18])
def test_a_run_that_rounds_resumes_exactly(tmp_path: Path, stop: int, dtype: str) -> None:
    whole, first = run(tmp_path, dtype=dtype), run(tmp_path, dtype=dtype)
    losses = steps(whole, 20)
    steps(first, stop)
    second = run(tmp_path, dtype=dtype)
    second.restore(checkpoint.load(checkpoint.save(tmp_path / "saved", first.snapshot())))
    assert all(torch.equal(shown(second)[name], shown(first)[name]) for name in SHAPES)
    assert steps(second, 20 - stop) == losses[stop:]
    assert equal(second.snapshot(), values(whole.snapshot()))
    assert all(torch.equal(shown(second)[name], shown(whole)[name]) for name in SHAPES)


def test_rounding_in_training_lessens_what_rounding_costs(tmp_path: Path) -> None:
    """At 4 bits, after the same steps, both rounded: the run that knew of it is better."""
    coarse = {name: Gptq(bits=4) if name != "blocks.gain" else Unquantized(dtype="f32") for name in SHAPES}
    results = {}
    for below in (0.9, 1e-9):
        train = train_spec(qat={"below": below}, steps=150, schedule={"warmdown_steps": 140})
        coarse_run = trainer(tmp_path, train, Toy(noise=0.0), grids=coarse)
        steps(coarse_run, 150)
        coarse_run.masters.fake_quantize(coarse)
        with torch.no_grad():
            results[below] = (
                sum(float(coarse_run._functions["score"](*coarse_run.loader.next()).mean()) for _ in range(64)) / 64
            )
    assert results[0.9] < results[1e-9]


def test_a_parameter_that_is_its_own_master_cannot_be_rounded() -> None:
    masters = Masters(Toy(), dict.fromkeys(SHAPES, torch.float32))
    with pytest.raises(ValueError, match=r"blocks\.down is the same tensor as its master"):
        masters.fake_quantize(SCHEMES)
