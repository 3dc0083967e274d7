"""The optimizers of a spec's `train:` section: what each does to the parameters that its pattern covers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.strict import NonNegativeFloat, Positive, PositiveFloat, Problem, StrictModel, Unit, later

Pattern = Annotated[str, Field(min_length=1, max_length=256)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean: with 1 it would never move
# Of methods that do something in place of an iteration: the fewest `steps` in which one iteration is left.
LEAST_STEPS: Mapping[str, int] = {"turbo": 2}


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


class AdamWSpec(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019) for the parameters that `match` covers."""

    kind: Literal["adamw"]
    match: Pattern
    lr: NonNegativeFloat
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat | Taper = 0.0


class MuonSpec(StrictModel):
    """Muon (Jordan, 2024): momentum whose matrix is orthogonalized by `steps` iterations.

    `method` is how: Newton-Schulz with one quintic; Polar Express, a quintic an iteration (Amsel et al. 2025, arXiv
    2505.16932); Turbo-Muon, which scales the rows in place of the first iteration, so that `steps: 5` are the published
    scaling and four iterations (arXiv 2512.04632). `equalize_rows` gives all rows one length before (MuonEq-R).
    `second_moment` is the decay of NorMuon's second moment of each row after (Li et al. 2025, arXiv 2510.05491);
    without it there is none.
    """

    kind: Literal["muon"]
    match: Pattern
    lr: NonNegativeFloat
    momentum: Unit | Ramp = 0.95
    nesterov: bool = True
    method: Literal["newton_schulz", "polar_express", "turbo"] = later("newton_schulz")
    steps: Annotated[int, Field(ge=1, le=20)] = 5
    equalize_rows: bool = later(False)
    second_moment: Decay | None = later(None)
    weight_decay: NonNegativeFloat | Taper = 0.0

    def problems(self) -> Iterator[Problem]:
        """There are iterations."""
        if self.steps < (least := LEAST_STEPS.get(self.method, 1)):
            message = f"the first iteration of {self.method} is step {least}, and `steps` is {self.steps}"
            yield Problem(("steps",), "S278", message, f"use at least {least}; without `steps` they are 5")


OptimizerSpec = Annotated[AdamWSpec | MuonSpec, Field(discriminator="kind")]
