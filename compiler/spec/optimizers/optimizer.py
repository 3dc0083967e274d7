"""The base of every entry of `train.optimizers`."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from specc.compiler.spec.optimizers.schedules import Taper
from specc.compiler.strict import NonNegativeFloat, Path, Pattern, StrictModel

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean: with 1 it would never move


class OptimizerSpec(StrictModel):
    """One entry of `train.optimizers`: the settings of an optimizer and the parameters that it updates.

    A subclass names itself by a `kind` Literal and adds its settings, in a file of this package. The update rule of
    the same name stands in `specc.runtime.optim`.

    Attributes:
        match: pattern of the parameter names that it updates, unless an earlier entry covers them.
        lr: learning rate, before the multiplier of `train.schedule`.
    """

    kind: str
    match: Pattern
    lr: NonNegativeFloat

    def refuses(self, shape: tuple[int, ...]) -> str:
        """Why it cannot update a parameter of this shape; empty where it can."""
        return ""

    def late_starts(self) -> Iterator[tuple[Path, str, float]]:
        """The settings that change from a share of the run on: the path, a name for messages, and the share."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Taper):
                yield (name, "after"), "the taper", value.after
