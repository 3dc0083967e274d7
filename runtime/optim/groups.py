"""Which optimizer owns which parameter, and the state of all of them by parameter name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specc.compiler.pattern import matches
from specc.compiler.train_spec import AdamWSpec, MuonSpec, OptimizerSpec
from specc.runtime.errors import RuntimeFailure
from specc.runtime.optim.muon import Muon
from specc.runtime.optim.schedule import value_at


class OptimizerError(RuntimeFailure):
    """The spec's optimizers do not fit the model's parameters."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Group:
    """One entry of `train.optimizers` and the parameters that it got."""

    spec: OptimizerSpec
    names: tuple[str, ...]


def assign(shapes: Mapping[str, Sequence[int]], specs: Sequence[OptimizerSpec]) -> tuple[Group, ...]:
    """Each parameter goes to the first entry whose pattern covers its name; the order of names stays.

    Raises OptimizerError for a parameter that no entry covers, and for one that Muon covers but is no matrix.
    """
    found: list[list[str]] = [[] for _ in specs]
    for name, shape in shapes.items():
        index = next((i for i, spec in enumerate(specs) if matches(spec.match, name)), None)
        if index is None:
            raise OptimizerError(
                f"no entry of train.optimizers covers the parameter {name}",
                'end the list with an entry that takes what is left: {kind: adamw, match: "*", lr: ...}',
            )
        if isinstance(specs[index], MuonSpec) and len(shape) != 2:
            raise OptimizerError(
                f"train.optimizers[{index}] (muon) covers {name} of shape {list(shape)}, which is no matrix",
                "narrow its match, or put an adamw entry for that parameter before it",
            )
        found[index].append(name)
    return tuple(Group(spec, tuple(names)) for spec, names in zip(specs, found, strict=True))


class Optimizers:
    """The optimizers of one model. `masters` are its f32 parameters by name, gradients in their `.grad`."""

    def __init__(self, masters: Mapping[str, nn.Parameter], specs: Sequence[OptimizerSpec]) -> None:
        groups = assign({name: master.shape for name, master in masters.items()}, specs)
        self._masters = masters
        self._parts = tuple(
            (group, _optimizer(group.spec, [masters[name] for name in group.names])) for group in groups if group.names
        )

    def step(self, multiplier: float, step: int) -> None:
        """One update with all learning rates times `multiplier`; `step` updates came before it."""
        for group, optimizer in self._parts:
            for settings in optimizer.param_groups:
                settings["lr"] = group.spec.lr * multiplier
                if isinstance(group.spec, MuonSpec):
                    settings["momentum"] = value_at(group.spec.momentum, step)
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """All state, not copied, as `kind.slot/parameter`, e.g. `adamw.exp_avg/blocks.0.mlp.up`."""
        return {
            f"{group.spec.kind}.{slot}/{name}": tensor
            for group, optimizer in self._parts
            for name in group.names
            for slot, tensor in optimizer.state[self._masters[name]].items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Copies `state` over what is there. It must have the names and shapes that `state()` has."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])


def _optimizer(spec: OptimizerSpec, params: list[nn.Parameter]) -> Optimizer:
    if isinstance(spec, MuonSpec):
        momentum = value_at(spec.momentum, 0)
        return Muon(params, spec.lr, momentum, spec.nesterov, spec.steps, spec.weight_decay)
    return _adamw(spec, params)


def _adamw(spec: AdamWSpec, params: list[nn.Parameter]) -> AdamW:
    """Torch's AdamW with its state there from the start, so that its names never depend on the step."""
    fused = params[0].is_cuda
    optimizer = AdamW(params, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=fused, foreach=False)
    for param in params:
        step = torch.zeros((), device=param.device if fused else "cpu")
        optimizer.state[param] = {
            "step": step,
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    return optimizer
