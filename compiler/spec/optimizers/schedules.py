"""Numbers of an optimizer that change during a run."""

from typing import Annotated

from pydantic import Field

from specc.compiler.strict import NonNegativeFloat, Positive, StrictModel, Unit


class Ramp(StrictModel):
    """A value that goes from `start` to `end` in a straight line over `steps` steps, and stays there."""

    start: Unit
    end: Unit
    steps: Positive


class Taper(StrictModel):
    """A value that is `start` until the share `after` of the run is done, and from there goes to `end` in a straight
    line."""

    start: NonNegativeFloat
    end: NonNegativeFloat
    after: Annotated[float, Field(ge=0, lt=1)]
