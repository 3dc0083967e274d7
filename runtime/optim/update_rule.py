"""The base of every update rule: how one kind of optimizer updates its parameters, and with which state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank

S = TypeVar("S", bound=OptimizerSpec)


class UpdateRule(ABC, Generic[S]):
    """One entry of `train.optimizers` with the parameters that it updates. A subclass is one kind of optimizer, in a
    file of this package; its spec stands in `specc.compiler.spec.optimizers`.

    An update reads numbers that change from step to step, such as the learning rate, from the device. It launches the
    same work every time and never waits for a GPU, so that a CUDA graph can hold it.

    Args:
        spec: the entry.
        parameters: the f32 master weights, by name; the gradient of each stands in its `.grad`.
        world: the processes that train together.

    Attributes:
        name: the `kind` of its spec.
        sharded: whether its parameters lie in `banks`, of whose gradients each process sums up only its part. The
            gradients of other rules are summed up whole on every process.
        banks: the parameters in groups that are summed up and updated at once.
    """

    name: ClassVar[str]
    sharded: ClassVar[bool] = False
    banks: Sequence[Bank] = ()

    def __init__(self, spec: S, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self.spec, self.parameters, self.world = spec, parameters, world

    @abstractmethod
    def numbers(self, multiplier: float, step: int, done: float) -> Sequence[float]:
        """The numbers that the next update reads, as many in every step.

        Args:
            multiplier: of the schedule, for the learning rate.
            step: updates made so far.
            done: the share of the run that is done, 0 to 1.
        """

    @abstractmethod
    def update(self, numbers: Sequence[Tensor]) -> None:
        """Updates the parameters from their gradients; `numbers` are those of `numbers`, each of shape []."""

    @abstractmethod
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The tensors that persist between updates, not copied: slot -> parameter name -> tensor. All are there before
        the first update, with the shapes that they keep."""

    def gather(self) -> None:
        """Makes the state whole on every process; all must call it."""
        for bank in self.banks:
            bank.gather()
