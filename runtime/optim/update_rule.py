"""The base class of update rules. An update rule defines how one kind of optimizer updates its parameters, and its
state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank
from specc.runtime.optim.schedule import Moment

S = TypeVar("S", bound=OptimizerSpec)


class UpdateRule(ABC, Generic[S]):
    """One entry of `train.optimizers` with the parameters that it updates.

    Each subclass is one kind of optimizer, in a file of this package; its spec is in `specc.compiler.spec.optimizers`.
    An update reads the numbers that change from step to step, such as the learning rate, from the device. It launches
    the same work every time and never waits for a GPU, so that it can be captured in a CUDA graph.

    Args:
        spec: the entry.
        parameters: the f32 master weights, by name, with gradients in `.grad`.
        world: the processes that train together.

    Attributes:
        name: the `kind` of its spec.
        sharded: whether its parameters are in `banks`, where each process sums only its part of the gradients. The
            gradients of other rules are summed whole on every process.
        banks: the parameters in groups that are summed and updated together.
    """

    name: ClassVar[str]
    sharded: ClassVar[bool] = False
    banks: Sequence[Bank] = ()

    def __init__(self, spec: S, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self.spec, self.parameters, self.world = spec, parameters, world

    @abstractmethod
    def numbers(self, now: Moment) -> Sequence[float]:
        """Returns the numbers that the update at `now` reads. Their count is the same in every step."""

    @abstractmethod
    def update(self, numbers: Sequence[Tensor]) -> None:
        """Updates the parameters from their gradients. `numbers` are the values returned by the method `numbers`, as
        tensors of shape []."""

    @abstractmethod
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the tensors that persist between updates, not copied: slot -> parameter name -> tensor. All exist
        before the first update, with their final shapes."""
