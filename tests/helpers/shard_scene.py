"""A process of test_optim_shards.py: each process of a world runs this file and prints one JSON object.

usage: shard_scene.py DEVICE, in the environment of torchrun. Steps with Muon's matrices shared out, beside the same
steps of one process with the sum of all gradients.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.spec.train import TrainSpec
from specc.runtime.distributed.world import World, joined
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.optimizers import Optimizers, sharded_parameters
from specc.runtime.optim.schedule import Moment

# Five, three and one of a shape: no number of ranks takes all of them in equal parts.
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"up{i}": (24, 8) for i in range(5)},
    **{f"down{i}": (8, 24) for i in range(3)},
    "square": (12, 12),
    "table": (20, 8),
    "gain": (7,),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "newton_schulz": {},
    "polar_express": {"method": "polar_express", "equalize_rows": True},
    "turbo": {"method": "turbo", "nesterov": False},
    "normuon": {"method": "polar_express", "second_moment": 0.9, "every": 2},
    "soap": {"kind": "soap", "basis_every": 3, "cautious_decay": True},
}
STEPS = 5


def specs(**settings: Any) -> tuple[OptimizerSpec, ...]:
    matrices = {"kind": "muon", "match": "{up,down,square}*", "lr": 0.1, "weight_decay": 0.1, **settings}
    momentum = {"at": ((0, 0.5), (3, 0.9)), "by": "step"}
    decay = {"at": ((0, 0.2), (0.4, 0.2), (1, 0.1))}
    if matrices["kind"] == "muon":
        matrices["momentum"] = momentum
    adamw = {"kind": "adamw", "match": "table", "lr": 0.05, "weight_decay": decay, "every": 2}
    entries = (matrices, adamw, {"kind": "lion", "match": "*", "lr": 0.05, "cautious_decay": True, "weight_decay": 1.0})
    return TrainSpec.model_validate({"tokens_per_step": 8, "steps": STEPS, "optimizers": entries}).optimizers


def model() -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(3)
    return nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})


def gradient(name: str, step: int, rank: int) -> Tensor:
    seed = 1000 * step + 10 * list(SHAPES).index(name) + rank
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def optimizers_of(world: World, settings: dict[str, Any], dtype: torch.dtype) -> tuple[Masters, Optimizers]:
    apart = sharded_parameters(SHAPES, specs(**settings)) if world.size > 1 else frozenset[str]()
    masters = Masters(model().to(world.device), dict.fromkeys(SHAPES, dtype), apart)
    return masters, Optimizers(masters.tensors, specs(**settings), world)


def advance(masters: Masters, optimizers: Optimizers, world: World, step: int, ranks: range) -> float:
    """One step with the gradients of `ranks`; returns the norm before clipping, to 1.5."""
    masters.clear()
    for rank in ranks:
        for name, param in masters.model_parameters.items():
            param.grad = gradient(name, step, rank).to(param.device, param.dtype)
        masters.collect()
    norm = masters.finish(len(ranks), 1.5, optimizers.banks, world)
    optimizers.set(Moment(1 / (step + 1), done=step / STEPS, step=step))
    optimizers.update(optimizers.work(step))
    masters.refresh()
    return float(norm)


def scene(world: World, settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    lone = World.alone().on(world.device)
    shared, alone = optimizers_of(world, settings, dtype), optimizers_of(lone, settings, dtype)
    norms = []
    for step in range(STEPS):
        if step == 3:  # all state by way of one rank, as in a checkpoint, into new optimizers
            shared[1].gather()
            state_of_first = {name: tensor.cpu().clone() for name, tensor in shared[1].state().items()}
            weights = {name: master.detach().clone() for name, master in shared[0].tensors.items()}
            state_of_first = world.first(lambda state_of_first=state_of_first: state_of_first)  # type: ignore[misc]
            shared = optimizers_of(world, settings, dtype)
            shared[0].restore(weights)
            shared[1].restore(state_of_first)
        ours = advance(*shared, world, step, range(world.rank, world.rank + 1))
        theirs = advance(*alone, lone, step, range(world.size))
        norms.append(abs(ours / theirs - 1))
    shared[1].gather()
    world.require_same("weight", shared[0].digests())
    weights_off = [float((shared[0].tensors[name] - alone[0].tensors[name]).abs().max().detach()) for name in SHAPES]
    state, wanted = shared[1].state(), alone[1].state()
    state_off = [float((state[name] - wanted[name]).abs().max()) for name in wanted]
    owned = [bank._shape[0] / len(bank.params) for bank in shared[1].banks]
    return {
        "norm": max(norms),
        "weights": max(weights_off),
        "state": max(state_off),
        "names": list(state) == list(wanted),
        "padding": max(owned),
    }


def main(device: str) -> None:
    with joined() as joined_world:
        world = joined_world.on(torch.device(device))
        results = {
            f"{name} {dtype}": scene(world, settings, dtype)
            for name, settings in VARIANTS.items()
            for dtype in (torch.float32, torch.bfloat16)
        }
        print(json.dumps(results), flush=True)
        world.wait()


if __name__ == "__main__":
    main(sys.argv[1])
