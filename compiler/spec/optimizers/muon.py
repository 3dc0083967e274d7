"""Settings of Muon and its variants."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.schedule import Rate, UnitRate
from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.strict import Problem, later

# The least `steps` of methods whose first steps are not iterations, so that at least one step iterates.
LEAST_STEPS: Mapping[str, int] = {"turbo": 2}


class MuonSpec(OptimizerSpec):
    """Muon (Jordan, 2024): momentum, whose matrix is orthogonalized by an iteration. For matrices only.

    Attributes:
        momentum: the momentum: a number, a formula in `t`, or a schedule.
        nesterov: whether the momentum is Nesterov's.
        method: the iteration. `newton_schulz` is Newton-Schulz with one quintic polynomial. `polar_express` has a
            separate quintic per iteration (Amsel et al. 2025, arXiv 2505.16932). `turbo` is Turbo-Muon, which scales
            the rows instead of the first iteration (arXiv 2512.04632).
        steps: the number of iterations. With `turbo`, the scaling counts as the first.
        equalize_rows: whether all rows are scaled to one length before the iterations (MuonEq-R).
        second_moment: the decay of NorMuon's second moment of each row, applied after the iterations (Li et al. 2025,
            arXiv 2510.05491). If unset, there is none.
        weight_decay: the decoupled weight decay, as the momentum.
    """

    kind: Literal["muon"]
    momentum: UnitRate = 0.95
    nesterov: bool = True
    method: Literal["newton_schulz", "polar_express", "turbo"] = later("newton_schulz")
    steps: Annotated[int, Field(ge=1, le=20)] = 5
    equalize_rows: bool = later(False)
    second_moment: Decay | None = later(None)
    weight_decay: Rate = 0.0

    def refuses(self, shape: tuple[int, ...]) -> str:
        """Returns a reason for every parameter that is not a matrix."""
        return "" if len(shape) == 2 else "muon updates only matrices"

    def problems(self) -> Iterator[Problem]:
        """Yields a problem if no step is an iteration."""
        if self.steps < (least := LEAST_STEPS.get(self.method, 1)):
            message = f"`steps` is {self.steps}, but {self.method} needs at least {least}"
            yield Problem(("steps",), "S278", message, f"use at least {least}; without `steps` they are 5")
