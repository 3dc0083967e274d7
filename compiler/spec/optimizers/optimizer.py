"""The base class of all entries of `train.optimizers`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field

from specc.compiler.changing_values import Rate
from specc.compiler.strict import Pattern, Positive, Problem, StrictModel, later

# The decay of a running mean; with a decay of 1, the mean would never change
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(StrictModel):
    """One entry of `train.optimizers`: the settings of an optimizer, and a pattern of the parameters that it updates.

    A subclass has a `kind` Literal as its tag and adds its settings, in a file of this package. The update rule of the
    same name is in `specc.runtime.optim`.

    `in_norm` is False if the rule reads only the signs of gradients. These gradients are not clipped, and are not part
    of the norm for `train.clip_norm`. The rule stores `slots` tensors per parameter, each with the shape of the
    parameter. An update allocates at most `temporaries` f32 numbers per element of its parameters. Parameters of one
    shape are updated together, which allocates `of_shape` more numbers per element.

    Attributes:
        match: a pattern of the names of the parameters to update. Parameters that an earlier entry matches are
            excluded.
        lr: the learning rate, before the multiplier of `train.schedule`: a number, a formula in `t`, or a schedule. `t`
            is the completed share of the run, from 0 to 1.
        weight_decay: the decoupled weight decay: a number, a formula in `t`, or a schedule.
        cautious_decay: whether numbers that the update moves away from zero do not decay (Chen et al. 2025, arXiv
            2510.12402).
        every: the number of steps from one update to the next. An update reads the mean of the gradients since the
            last update.
    """

    in_norm: ClassVar[bool] = True
    slots: ClassVar[int] = 0
    temporaries: ClassVar[float] = 1  # the directions of the update

    kind: str
    match: Pattern
    lr: Rate
    weight_decay: Rate = 0.0
    cautious_decay: bool = later(False)
    every: Positive = later(1)

    @staticmethod
    def instead() -> Mapping[str, str]:
        return {"learning_rate": "write `lr` in an optimizer", "wd": "write `weight_decay` in an optimizer"}

    def refuses(self, shape: tuple[int, ...]) -> str:
        """Returns the reason why the optimizer cannot update a parameter of this shape, or ""."""
        return ""

    def state_numbers(self, shape: tuple[int, ...]) -> int:
        """Returns the number of f32 numbers that the optimizer stores between steps for a parameter of this shape."""
        return prod(shape) * self.slots + (prod(shape) + 1) * (self.every > 1)  # the sum and the number of gradients

    @property
    def of_shape(self) -> float:
        """The number of temporary f32 values that the update of all parameters of one shape allocates per element."""
        return 0

    def update_numbers(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Returns the peak of the temporary memory of an update, as a number of f32 values. `shapes` are the shapes of
        the parameters that are updated."""
        by_shape: Counter[tuple[int, ...]] = Counter()
        for shape in shapes:
            by_shape[shape] += prod(shape)
        before = 1.25 * self.cautious_decay  # the values before the update, and one flag per value
        whole = (self.temporaries + before) * by_shape.total()
        return round(whole + self.of_shape * max(by_shape.values(), default=0))

    def problems(self) -> Iterator[Problem]:
        if self.cautious_decay and self.weight_decay == 0:
            message = "`cautious_decay` has no effect, because `weight_decay` is 0"
            yield Problem(("cautious_decay",), "S288", message, "set `weight_decay`, or remove `cautious_decay`")
