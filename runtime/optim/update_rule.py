"""The base class of update rules. An update rule defines the update and the state of one kind of optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank
from specc.runtime.optim.schedule import Moment, value_at

S = TypeVar("S", bound=OptimizerSpec)
UPDATE, SUM = "update", "sum"  # the kinds of work in a step: an update, or adding a gradient that a later update reads


class UpdateRule(ABC, Generic[S]):
    """The update rule of one entry of `train.optimizers`, with the parameters that it updates.

    Each subclass is one kind of optimizer, in a file of this package. The settings are in
    `specc.compiler.spec.optimizers`. This class implements weight decay, and sums gradients between updates. CUDA
    graphs can contain updates. Numbers that change from step to step are therefore read from the device, and equal
    `work` launches equal kernels.

    Args:
        spec: the entry.
        parameters: the f32 master weights, by name, with gradients in `.grad`.
        world: the processes that train together.

    Attributes:
        name: the `kind` of the entry.
        sharded: whether each process sums and updates only a part of the parameters, in `banks`.
        scheduled: the settings, other than `lr` and `weight_decay`, that may change from step to step.
        banks: groups of parameters that are summed and updated together.
        tensors: the parameters in order.
    """

    name: ClassVar[str]
    sharded: ClassVar[bool] = False
    scheduled: ClassVar[tuple[str, ...]] = ()
    banks: Sequence[Bank] = ()

    def __init__(self, spec: S, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self.spec, self.parameters, self.world = spec, parameters, world
        self.tensors: list[Tensor] = list(parameters.values())
        self._sums = self.new_slot() if spec.every > 1 else []

    def new_slot(self) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in self.tensors]

    def local(self, slot: Sequence[Tensor]) -> list[Tensor]:
        """Returns the part of the state tensors that this process updates, with the shapes of `gradients`."""
        return list(slot)

    def by_name(self, slot: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.parameters, slot, strict=True))

    def gradients(self) -> list[Tensor]:
        gradients = [tensor.grad for tensor in self.tensors if tensor.grad is not None]
        if len(gradients) < len(self.tensors):
            raise ValueError("an update needs the gradient of every parameter")
        return gradients

    def numbers(self, now: Moment) -> Sequence[float]:
        """Returns the learning rate, the weight decay, and the values of `scheduled` in the step at `now`."""
        spec = self.spec
        others = (value_at(getattr(spec, setting), now) for setting in self.scheduled)
        return (value_at(spec.lr, now) * now.multiplier, value_at(spec.weight_decay, now), *others)

    def work(self, step: int) -> str:
        """Returns the work in step number `step`, counted from 0: SUM, UPDATE, or another kind that `update` knows."""
        return SUM if (step + 1) % self.spec.every else UPDATE

    def waits(self, work: str) -> bool:
        """Returns whether the host waits for the GPU during this work. A CUDA graph cannot contain such work."""
        return False

    @torch.no_grad()
    def step(self, work: str, numbers: Sequence[Tensor]) -> None:
        """Sums the gradients, and performs the update if `work` is not SUM. `numbers` is a result of the method
        `numbers`, as tensors.
        """
        lr, weight_decay, *others = numbers
        if self._sums:
            sums, gradients = self.local(self._sums), self.gradients()
            torch._foreach_add_(sums, gradients)
            if work == SUM:
                self.discard()
                return
            torch._foreach_copy_(gradients, sums)
            torch._foreach_mul_(gradients, 1 / self.spec.every)
            torch._foreach_zero_(sums)
        if self.spec.cautious_decay:
            before = [tensor.detach().clone() for tensor in self.tensors]
            self.update(work, (lr, *others))
            moves_toward_zero = [(old - new) * old >= 0 for old, new in zip(before, self.tensors, strict=True)]
            torch._foreach_mul_(before, moves_toward_zero)
            torch._foreach_mul_(before, lr * weight_decay)
            torch._foreach_sub_(self.tensors, before)
        else:
            if self.spec.weight_decay != 0:
                self.decay(lr * weight_decay)
            self.update(work, (lr, *others))

    def decay(self, share: Tensor) -> None:
        torch._foreach_mul_(self.tensors, 1 - share)

    def discard(self) -> None:
        """Releases the gradients of this step. Later updates read the sums instead."""

    @abstractmethod
    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        """Updates the parameters from their gradients, without weight decay.

        Args:
            work: the kind of update, as returned by the method `work`. Never SUM.
            numbers: the learning rate and the values of `scheduled`, as tensors of shape [].
        """

    @abstractmethod
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns all tensors that persist between updates, by kind of state and parameter name, without a copy.

        All tensors exist before the first update, in their final shapes.
        """

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {**self.state(), **({"gradient_sum": self.by_name(self._sums)} if self._sums else {})}
