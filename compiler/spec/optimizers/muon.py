"""Muon and its variants."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.spec.optimizers.schedules import Ramp, Taper
from specc.compiler.strict import NonNegativeFloat, Problem, Unit, later

# Of methods whose first steps are no iterations: the fewest `steps` that iterate once.
LEAST_STEPS: Mapping[str, int] = {"turbo": 2}


class MuonSpec(OptimizerSpec):
    """Muon (Jordan, 2024): momentum whose matrix is orthogonalized by `steps` iterations.

    `method` is how: Newton-Schulz with one quintic; Polar Express, a quintic an iteration (Amsel et al. 2025, arXiv
    2505.16932); Turbo-Muon, which scales the rows in place of the first iteration, so that `steps: 5` are the published
    scaling and four iterations (arXiv 2512.04632). `equalize_rows` gives all rows one length before (MuonEq-R).
    `second_moment` is the decay of NorMuon's second moment of each row after (Li et al. 2025, arXiv 2510.05491);
    without it there is none.
    """

    kind: Literal["muon"]
    momentum: Unit | Ramp = 0.95
    nesterov: bool = True
    method: Literal["newton_schulz", "polar_express", "turbo"] = later("newton_schulz")
    steps: Annotated[int, Field(ge=1, le=20)] = 5
    equalize_rows: bool = later(False)
    second_moment: Decay | None = later(None)
    weight_decay: NonNegativeFloat | Taper = 0.0

    def refuses(self, shape: tuple[int, ...]) -> str:
        """All but matrices."""
        return "" if len(shape) == 2 else "muon orthogonalizes matrices"

    def problems(self) -> Iterator[Problem]:
        """At least one step iterates."""
        if self.steps < (least := LEAST_STEPS.get(self.method, 1)):
            message = f"the first iteration of {self.method} is step {least}, and `steps` is {self.steps}"
            yield Problem(("steps",), "S278", message, f"use at least {least}; without `steps` they are 5")
