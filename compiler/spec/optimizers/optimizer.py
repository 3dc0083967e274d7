"""The base class of all entries of `train.optimizers`."""

from typing import Annotated

from pydantic import Field

from specc.compiler.schedule import Rate
from specc.compiler.strict import Pattern, StrictModel

Decay = Annotated[float, Field(ge=0, lt=1)]  # decay of a running mean, which would never change with 1


class OptimizerSpec(StrictModel):
    """One entry of `train.optimizers`: the settings of an optimizer and the parameters that it updates.

    A subclass has a `kind` Literal as its tag and adds its settings, in a file of this package. The update rule of the
    same name is in `specc.runtime.optim`.

    Attributes:
        match: the pattern of the names of the parameters to update. Parameters of an earlier entry are excluded.
        lr: the learning rate, before the multiplier of `train.schedule`: a number, a formula in `t`, or a schedule. `t`
            is the share of the run that is complete, from 0 to 1.
    """

    kind: str
    match: Pattern
    lr: Rate

    def refuses(self, shape: tuple[int, ...]) -> str:
        """Returns why the optimizer cannot update a parameter of this shape; empty if it can."""
        return ""
