"""All optimizers of one model: which parameters each updates, one update of all, and their state by parameter name."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.passes.optimizers import owners
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank
from specc.runtime.optim.rule_of import rule_of


def sharded_parameters(shapes: Mapping[str, tuple[int, ...]], specs: Sequence[OptimizerSpec]) -> frozenset[str]:
    """The parameters of whose gradients each of several processes sums up a part. Raises as `owners` does."""
    return frozenset(name for name, index in owners(specs, shapes).items() if rule_of(specs[index]).sharded)


class Optimizers:
    """The optimizers of one model.

    `set` writes what changes from step to step, such as learning rates, to the device; `update` reads nothing else,
    launches the same work every time and never waits for a GPU, so that a CUDA graph can hold it.

    Args:
        masters: the f32 master weights, by name; gradients stand in their `.grad`.
        specs: the entries of `train.optimizers`.
        world: the processes that train together. Each has the state of its part of sharded parameters alone, until
            `gather`.

    Raises:
        LoweringError: as `owners` does.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], specs: Sequence[OptimizerSpec], world: World | None = None
    ) -> None:
        owner = owners(specs, {name: tuple(master.shape) for name, master in masters.items()})
        groups = [{name: masters[name] for name in masters if owner[name] == i} for i in range(len(specs))]
        world = world or World.alone()
        self._rules = [rule_of(spec)(spec, group, world) for spec, group in zip(specs, groups, strict=True)]
        device = next(iter(masters.values())).device
        # Torch's AdamW reads an f32 rate on a GPU; on the CPU it reads Python's, of which f64 is the very value.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        counts = [len(rule.numbers(1.0, 0, 0.0)) for rule in self._rules]
        self._numbers = torch.zeros(sum(counts), dtype=dtype, device=device)
        self._split = [part.unbind() for part in torch.split(self._numbers, counts)]

    @property
    def banks(self) -> list[Bank]:
        """The sharded parameters, of which several processes sum up parts."""
        return [bank for rule in self._rules for bank in rule.banks]

    def step(self, multiplier: float, step: int, done: float = 0.0) -> None:
        """One update with all learning rates times `multiplier`; `step` updates came before it, and `done` is the
        share of the run behind it."""
        self.set(multiplier, step, done)
        self.update()

    def set(self, multiplier: float, step: int, done: float = 0.0) -> None:
        """Writes the numbers of the next update to the device, without waiting for it."""
        values = [number for rule in self._rules for number in rule.numbers(multiplier, step, done)]
        tensor = torch.tensor(values, dtype=torch.float64).to(self._numbers.dtype)
        self._numbers.copy_(tensor.pin_memory() if self._numbers.is_cuda else tensor, non_blocking=True)

    def update(self) -> None:
        """One update with the numbers that were set last."""
        with torch.profiler.record_function("specc.optimizer"):  # a profile counts its launches by this range
            for rule, numbers in zip(self._rules, self._split, strict=True):
                rule.update(numbers)

    def gather(self) -> None:
        """Makes the state whole on every process; all must call it."""
        for rule in self._rules:
            rule.gather()

    def state(self) -> dict[str, Tensor]:
        """All state, not copied, as `kind.slot/parameter`, e.g. `adamw.exp_avg/blocks.0.mlp.up`."""
        return {
            f"{rule.name}.{slot}/{name}": tensor
            for rule in self._rules
            for slot, tensors in rule.state().items()
            for name, tensor in tensors.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Copies `state` over what is there. It must have the names and shapes that `state()` has."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])
