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
# The kinds of work in a step. UPDATE changes the parameters. SUM only adds the gradient for a later update.
UPDATE, SUM = "update", "sum"
COUNT = "gradient_count"  # the kind of state with the number of summed gradients


class UpdateRule(ABC, Generic[S]):
    """The update rule of one entry of `train.optimizers`, with the parameters that it updates.

    Each subclass implements one kind of optimizer, in a separate file of this package. The settings of the kinds are in
    `specc.compiler.spec.optimizers`. This class implements weight decay, and the summation of gradients over the steps
    between two updates. CUDA graphs can contain updates. An update therefore reads numbers that change between steps
    from device memory, and always launches the same kernels for equal values of `work`.

    Args:
        spec: the entry of `train.optimizers`.
        parameters: the f32 master weights, by name, with gradients in `.grad`.
        world: the processes that train together.

    Attributes:
        name: the `kind` of the entry.
        sharded: whether each process sums the gradients and computes the updates for only a part of the parameters.
        scheduled: the names of the settings that may change from step to step, except `lr` and `weight_decay`.
        banks: the banks of a sharded update rule. A bank contains all matrices of one shape.
        tensors: the parameters, in the order of `parameters`.
    """

    name: ClassVar[str]
    sharded: ClassVar[bool] = False
    scheduled: ClassVar[tuple[str, ...]] = ()
    banks: Sequence[Bank] = ()

    def __init__(self, spec: S, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self.spec, self.parameters, self.world = spec, parameters, world
        self.tensors: list[Tensor] = list(parameters.values())
        # The sums of gradients since the last update, and the numbers of gradients in the sums
        self._sums, self._counts = (self.new_slot(), self.new_counts()) if spec.every > 1 else ([], [])

    def new_slot(self) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in self.tensors]

    def new_counts(self) -> list[Tensor]:
        return [tensor.new_zeros(()) for tensor in self.tensors]

    def local(self, slot: Sequence[Tensor]) -> list[Tensor]:
        """Returns the part of the state tensors `slot` that this process updates.

        The result has the shapes of the result of the method `gradients`.
        """
        return list(slot)

    def by_name(self, slot: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.parameters, slot, strict=True))

    def gradients(self) -> list[Tensor]:
        gradients = [tensor.grad for tensor in self.tensors if tensor.grad is not None]
        if len(gradients) < len(self.tensors):
            raise ValueError("an update needs the gradient of every parameter")
        return gradients

    def numbers(self, now: Moment) -> Sequence[float]:
        """Returns the learning rate, the weight decay, and the values of the settings in `scheduled`, for the step at
        `now`.
        """
        spec = self.spec
        others = (value_at(getattr(spec, setting), now) for setting in self.scheduled)
        return (value_at(spec.lr, now) * now.multiplier, value_at(spec.weight_decay, now), *others)

    def work(self, step: int) -> str:
        """Returns the kind of work in step `step`, counted from 0.

        The kind is SUM if the step only sums gradients. Otherwise, the kind is UPDATE, or another kind that a subclass
        defines.
        """
        return SUM if (step + 1) % self.spec.every else UPDATE

    def waits(self, work: str) -> bool:
        """Returns whether the host waits for the GPU during `work`. In this case, a CUDA graph cannot contain the
        work.
        """
        return False

    @torch.no_grad()
    def step(self, work: str, numbers: Sequence[Tensor]) -> None:
        """Sums the gradients, and performs an update if `work` is not SUM.

        Args:
            work: the kind of work, as returned by the method `work`.
            numbers: the result of the method `numbers`, as tensors of shape [] on the device.
        """
        lr, weight_decay, *others = numbers
        if self._sums:
            sums, counts, gradients = self.local(self._sums), self.local(self._counts), self.gradients()
            torch._foreach_add_(sums, gradients)
            torch._foreach_add_(counts, 1)
            if work == SUM:
                self.discard()
                return
            torch._foreach_copy_(gradients, sums)
            torch._foreach_div_(gradients, counts)
            torch._foreach_zero_([*sums, *counts])
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
        """Releases the gradients of this step after they have been added to the sums."""

    @abstractmethod
    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        """Updates the parameters from their gradients, without weight decay.

        Args:
            work: the kind of update, as returned by the method `work`. The kind is never SUM.
            numbers: the learning rate and the values of the settings in `scheduled`, as tensors of shape [].
        """

    @abstractmethod
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns all tensors that persist between updates, by kind of state and parameter name.

        The tensors are not copies. They exist in their final shapes before the first update.
        """

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        sums = {"gradient_sum": self._sums, COUNT: self._counts} if self._sums else {}
        return {**self.state(), **{slot: self.by_name(tensors) for slot, tensors in sums.items()}}
