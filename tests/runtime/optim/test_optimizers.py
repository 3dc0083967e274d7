"""Which optimizer gets which parameter, and state by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.compiler.passes.optimizers import owners
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.spec.train import TrainSpec
from specc.runtime.optim.optimizers import Optimizers
from specc.runtime.optim.schedule import Moment

SHAPES = {"embed": (10, 4), "blocks.0.up": (8, 4), "blocks.0.down": (4, 8), "blocks.0.gain": (4,)}


def specs(*entries: dict[str, Any]) -> tuple[OptimizerSpec, ...]:
    return TrainSpec.model_validate({"tokens_per_step": 8, "steps": 1, "optimizers": entries}).optimizers


def muon(match: str, **more: Any) -> dict[str, Any]:
    return {"kind": "muon", "match": match, "lr": 0.02, **more}


def adamw(match: str, **more: Any) -> dict[str, Any]:
    return {"kind": "adamw", "match": match, "lr": 0.01, **more}


ENTRIES = specs(
    muon("blocks.*.{up,down}", momentum={"at": ((0, 0.5), (4, 0.9)), "by": "step"}),
    adamw("embed", weight_decay=0.1),
    adamw("*"),
)


def masters(order: int = 1) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    return dict(list(parameters.items())[::order])


def step(params: dict[str, nn.Parameter], optimizers: Optimizers, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for name in SHAPES:
        params[name].grad = torch.randn(SHAPES[name], generator=generator)
    optimizers.set(Moment(1 / (number + 1), step=number))
    optimizers.update(optimizers.work(number))


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "adamw"},
        {"kind": "lion"},
        {"kind": "lion", "every": 2},
        {"kind": "muon"},
        {"kind": "muon", "second_moment": 0.9},
        {"kind": "sign"},
        {"kind": "soap"},
        {"kind": "soap", "largest_side": 5},
    ],
)
def test_the_stated_numbers_are_those_of_the_state(more: dict[str, Any]) -> None:
    """Also of stacks of matrices. Plans add these numbers up."""
    (spec,) = specs({"match": "*", "lr": 0.1, **more})
    parameters = {"up": nn.Parameter(torch.zeros(8, 4)), "experts": nn.Parameter(torch.zeros(3, 4, 8))}
    stated = sum(spec.state_numbers(tuple(parameter.shape)) for parameter in parameters.values())
    assert sum(tensor.numel() for tensor in Optimizers(parameters, (spec,)).state().values()) == stated


def test_each_parameter_has_one_owner_that_takes_it() -> None:
    for wrong, code in ((specs(muon("blocks.*.{up,down}"), adamw("embed")), "S310"), (specs(muon("*")), "S309")):
        with pytest.raises(LoweringError) as caught:
            Optimizers(masters(), wrong)
        assert [problem.code for problem in caught.value.problems] == [code]
    assert owners(specs(muon("*.up"), adamw("blocks.*"), muon("*")), SHAPES) == {
        "embed": 2,
        "blocks.0.up": 0,
        "blocks.0.down": 1,
        "blocks.0.gain": 1,
    }


def test_state_is_by_name() -> None:
    names = set(Optimizers(masters(), ENTRIES).state())
    adam = {f"adamw.{slot}/{name}" for slot in ("step", "exp_avg", "exp_avg_sq") for name in ("embed", "blocks.0.gain")}
    assert names == adam | {"muon.momentum/blocks.0.up", "muon.momentum/blocks.0.down"}


def test_state_made_at_the_start_changes_nothing() -> None:
    params, plain = masters(), masters()
    optimizers = Optimizers(params, specs(adamw("*", weight_decay=0.1)))
    oracle = torch.optim.AdamW(plain.values(), 0.01, (0.9, 0.95), 1e-8, 0.1, foreach=False)
    for number in range(5):
        step(params, optimizers, number)
        for name, param in plain.items():
            param.grad = params[name].grad
        oracle.param_groups[0]["lr"] = 0.01 / (number + 1)
        oracle.step()
    assert all(torch.equal(params[name], plain[name]) for name in SHAPES)


@pytest.mark.parametrize("order", [1, -1])
def test_restored_state_goes_on_bit_for_bit_in_any_order_of_parameters(order: int) -> None:
    params = masters()
    optimizers = Optimizers(params, ENTRIES)
    for number in range(3):
        step(params, optimizers, number)
    other = {name: nn.Parameter(params[name].detach().clone()) for name in masters(order)}
    resumed = Optimizers(other, ENTRIES)
    resumed.restore({name: tensor.clone() for name, tensor in optimizers.state().items()})
    for number in range(3, 6):
        step(params, optimizers, number)
        step(other, resumed, number)
    assert all(torch.equal(params[name], other[name]) for name in SHAPES)
    ours, theirs = optimizers.state(), resumed.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_rates_and_momentum_follow_the_step() -> None:
    """One matrix whose gradient is constant: its momentum buffer tells the momentum of each step."""
    params = {"w": nn.Parameter(torch.eye(3))}
    optimizers = Optimizers(params, specs(muon("w", momentum={"at": ((0, 0.5), (4, 0.9)), "by": "step"})))
    buffer, result = 0.0, []
    for number in range(6):
        params["w"].grad = torch.eye(3)
        optimizers.set(Moment(0.0, step=number))
        optimizers.update(optimizers.work(number))
        now: Tensor = optimizers.state()["muon.momentum/w"]
        result.append((float(now[0, 0]) - 1) / buffer if buffer else 0.5)
        buffer = float(now[0, 0])
    assert result == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 0.9], abs=1e-6)
    assert torch.equal(params["w"].detach(), torch.eye(3))  # a multiplier of 0 moves nothing
