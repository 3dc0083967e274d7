"""Optimizer settings that change during a run."""

from typing import Annotated

from pydantic import Field

from specc.compiler.strict import NonNegativeFloat, Positive, StrictModel, Unit


class Ramp(StrictModel):
    """A value that changes linearly from `start` to `end` over `steps` steps and is constant afterwards.

    Attributes:
        start: the value at the first step.
        end: the value from step `steps` on.
        steps: the steps of the change.
    """

    start: Unit
    end: Unit
    steps: Positive


class Taper(StrictModel):
    """A value that is `start` until the share `after` of the run, then changes linearly to `end` until the run ends.

    Attributes:
        start: the value until the share `after`.
        end: the value at the end of the run.
        after: the share of the run at which the change begins.
    """

    start: NonNegativeFloat
    end: NonNegativeFloat
    after: Annotated[float, Field(ge=0, lt=1)]
