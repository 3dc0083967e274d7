"""All optimizers of one model, with one common update and one common state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.catalog import classes
from specc.compiler.passes.optimizers import owners
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime import optim
from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank
from specc.runtime.optim.schedule import Moment
from specc.runtime.optim.update_rule import COUNT, UpdateRule

Work = tuple[str, ...]  # the kind of work of each optimizer in a step


def rule_of(spec: OptimizerSpec) -> type[UpdateRule[Any]]:
    """Returns the update rule for the kind of an optimizer, such as `adamw`."""
    rules: Mapping[str, type[UpdateRule[Any]]] = classes(optim, UpdateRule)
    return rules[spec.kind]


def unclipped_parameters(shapes: Mapping[str, tuple[int, ...]], specs: Sequence[OptimizerSpec]) -> frozenset[str]:
    """Returns the names of the parameters whose gradients `train.clip_norm` neither measures nor clips.

    Raises LoweringError if a parameter has no optimizer, or if an optimizer does not support its parameters.
    """
    return frozenset(name for name, index in owners(specs, shapes).items() if not specs[index].in_norm)


def sharded_parameters(shapes: Mapping[str, tuple[int, ...]], specs: Sequence[OptimizerSpec]) -> frozenset[str]:
    """Returns the names of the parameters whose updates are divided among the processes.

    Raises LoweringError if a parameter has no optimizer, or if an optimizer does not support its parameters.
    """
    return frozenset(name for name, index in owners(specs, shapes).items() if rule_of(specs[index]).sharded)


class Optimizers:
    """The optimizers of one model.

    The method `set` writes the scheduled numbers of a step, such as learning rates, to the device. For equal values of
    `work`, the method `update` always launches the same kernels. One CUDA graph for each value of `work` can therefore
    replay `update`, unless `waits` returns True.

    Args:
        masters: the f32 master weights, by name, with gradients in `.grad`.
        specs: the entries of `train.optimizers`.
        world: the processes that train together.

    Raises:
        LoweringError: if a parameter has no optimizer, or if an optimizer does not support its parameters.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], specs: Sequence[OptimizerSpec], world: World | None = None
    ) -> None:
        owner = owners(specs, {name: tuple(master.shape) for name, master in masters.items()})
        groups = [{name: masters[name] for name in masters if owner[name] == i} for i in range(len(specs))]
        world = world or World.alone()
        self._rules = [rule_of(spec)(spec, group, world) for spec, group in zip(specs, groups, strict=True)]
        device = next(iter(masters.values())).device
        # On a GPU, Torch's AdamW reads the learning rate as f32. On the CPU, it reads a Python float, which is f64.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        counts = [len(rule.numbers(Moment())) for rule in self._rules]
        self._numbers = torch.zeros(sum(counts), dtype=dtype, device=device)
        self._split = [part.unbind() for part in torch.split(self._numbers, counts)]

    @property
    def banks(self) -> list[Bank]:
        return [bank for rule in self._rules for bank in rule.banks]

    def set(self, now: Moment) -> None:
        """Writes the scheduled numbers for `now` to the device, without waiting for the device."""
        values = [number for rule in self._rules for number in rule.numbers(now)]
        tensor = torch.tensor(values, dtype=torch.float64).to(self._numbers.dtype)
        self._numbers.copy_(tensor.pin_memory() if self._numbers.is_cuda else tensor, non_blocking=True)

    def work(self, step: int) -> Work:
        return tuple(rule.work(step) for rule in self._rules)

    def waits(self, work: Work) -> bool:
        return any(rule.waits(part) for rule, part in zip(self._rules, work, strict=True))

    def update(self, work: Work) -> None:
        """Performs one update with the numbers of the last call of `set`."""
        for rule, part, numbers in zip(self._rules, work, self._split, strict=True):
            rule.step(part, numbers)

    def gather(self) -> None:
        """Gathers the complete state on every process. All processes must call this method."""
        for bank in self.banks:
            bank.gather()

    def state(self) -> dict[str, Tensor]:
        """Returns the state of all optimizers, without copies of tensors.

        A key contains the kind of the optimizer, the kind of state, and the name of the parameter, such as
        `adamw.exp_avg/blocks.0.mlp.up`.
        """
        return {
            f"{rule.name}.{slot}/{name}": tensor
            for rule in self._rules
            for slot, tensors in rule.slots().items()
            for name, tensor in tensors.items()
        }

    def completed(self, state: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns the state of a checkpoint before step `step`. Older checkpoints lack the numbers of summed gradients.
        The result then contains the numbers of a run without skipped steps.
        """
        counts = {
            f"{rule.name}.{COUNT}/{name}": torch.full_like(count, step % rule.spec.every)
            for rule in self._rules
            for name, count in rule.slots().get(COUNT, {}).items()
        }
        return {**counts, **state}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Overwrites the state with `state`, which must have the keys and shapes of the current state."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])
