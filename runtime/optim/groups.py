"""Which optimizer owns which parameter, and the state of all of them by parameter name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specc.compiler.pattern import matches
from specc.compiler.spec.optimizers import AdamWSpec, MuonSpec, OptimizerSpec, Taper
from specc.runtime.errors import RuntimeFailure
from specc.runtime.optim.muon import Bank, Muon, Shards
from specc.runtime.optim.schedule import tapered, value_at


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


def shared_out(shapes: Mapping[str, Sequence[int]], specs: Sequence[OptimizerSpec]) -> frozenset[str]:
    """The parameters whose gradients several processes add up in parts: those of Muon. Raises as `assign` does."""
    return frozenset(
        name for group in assign(shapes, specs) if isinstance(group.spec, MuonSpec) for name in group.names
    )


class Optimizers:
    """The optimizers of one model. `masters` are its f32 parameters by name, gradients in their `.grad`.

    What changes from step to step, such as learning rates, is numbers on the device that `set` writes; `update`
    reads nothing else, launches the same work every time and never waits for a GPU, so that a CUDA graph holds it.
    With `shards` of several processes, each has the state of its part of Muon's matrices alone until `gather`.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], specs: Sequence[OptimizerSpec], shards: Shards | None = None
    ) -> None:
        groups = assign({name: master.shape for name, master in masters.items()}, specs)
        self._masters = masters
        used = [group for group in groups if group.names]
        device = next(iter(masters.values())).device
        # Torch's AdamW reads an f32 rate on a GPU; on the CPU it reads Python's, of which f64 is the very value.
        kind = torch.float32 if device.type == "cuda" else torch.float64
        self._numbers = torch.zeros(len(used), 3, dtype=kind, device=device)
        self._parts = tuple(
            _Part(group, [masters[name] for name in group.names], numbers, shards)
            for group, numbers in zip(used, self._numbers, strict=True)
        )

    @property
    def banks(self) -> list[Bank]:
        """Muon's matrices by shape: what several processes add up in parts."""
        return [bank for part in self._parts if isinstance(part.optimizer, Muon) for bank in part.optimizer.banks]

    def step(self, multiplier: float, step: int, done: float = 0.0) -> None:
        """One update with all learning rates times `multiplier`; `step` updates came before it, and `done` is the
        share of the run behind it."""
        self.set(multiplier, step, done)
        self.update()

    def set(self, multiplier: float, step: int, done: float = 0.0) -> None:
        """Writes the numbers of the next update to the device, without waiting for it."""
        values = torch.tensor([part.numbers(multiplier, step, done) for part in self._parts], dtype=torch.float64)
        values = values.to(self._numbers.dtype)
        self._numbers.copy_(values.pin_memory() if self._numbers.is_cuda else values, non_blocking=True)

    def update(self) -> None:
        """One update with the numbers that were set last."""
        for part in self._parts:
            part.update()

    def gather(self) -> None:
        """Makes the state whole on every rank; all must call it."""
        for part in self._parts:
            if isinstance(part.optimizer, Muon):
                part.optimizer.gather()

    def state(self) -> dict[str, Tensor]:
        """All state, not copied, as `kind.slot/parameter`, e.g. `adamw.exp_avg/blocks.0.mlp.up`."""
        return {
            f"{part.group.spec.kind}.{slot}/{name}": tensor
            for part in self._parts
            for name in part.group.names
            for slot, tensor in part.optimizer.state[self._masters[name]].items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Copies `state` over what is there. It must have the names and shapes that `state()` has."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])


class _Part:
    """One entry at work: learning rate, momentum and weight decay are the three `numbers` on the device."""

    optimizer: Optimizer

    def __init__(self, group: Group, params: list[nn.Parameter], numbers: Tensor, shards: Shards | None) -> None:
        self.group = group
        self._params: list[Tensor] = [*params]
        self._lr, momentum, self._decay = numbers.unbind()
        spec = group.spec
        self._decays_apart = isinstance(spec, AdamWSpec) and isinstance(spec.weight_decay, Taper)
        if isinstance(spec, MuonSpec):
            self.optimizer = Muon(
                params,
                self._lr,
                momentum,
                spec.nesterov,
                spec.steps,
                self._decay,
                method=spec.method,
                equalize_rows=spec.equalize_rows,
                second_moment=spec.second_moment,
                shards=shards,
            )
        else:
            self.optimizer = _adamw(spec, params, self._lr)

    def numbers(self, multiplier: float, step: int, done: float) -> tuple[float, float, float]:
        """What the next update reads."""
        spec = self.group.spec
        momentum = value_at(spec.momentum, step) if isinstance(spec, MuonSpec) else 0.0
        return spec.lr * multiplier, momentum, tapered(spec.weight_decay, done)

    @torch.no_grad()
    def update(self) -> None:
        if self._decays_apart:  # Torch takes its weight decay as a number of the launch
            torch._foreach_mul_(self._params, 1 - self._lr * self._decay)
        self.optimizer.step()


def _adamw(spec: AdamWSpec, params: list[nn.Parameter], lr: Tensor) -> AdamW:
    """Torch's AdamW with its state there from the start, so that its names never depend on the step."""
    fused = params[0].is_cuda
    decay = 0.0 if isinstance(spec.weight_decay, Taper) else spec.weight_decay
    optimizer = AdamW(params, lr, spec.betas, spec.eps, decay, fused=fused, foreach=False, capturable=fused)
    optimizer._warned_capturable_if_run_uncaptured = True  # it may be captured, and need not be
    for param in params:
        step = torch.zeros((), device=param.device if fused else "cpu")
        optimizer.state[param] = {
            "step": step,
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    return optimizer
