"""Settings of Muon and its variants."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.changing_values import UnitRate
from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.strict import Problem, later

# The fewest `steps` of methods whose first steps are not iterations. At least one step must iterate.
LEAST_STEPS: Mapping[str, int] = {"turbo": 2}
LARGEST = 2.0  # the largest allowed singular value of an update; the published methods reach at most 1.21
Coefficients = tuple[float, float, float]


class MuonSpec(OptimizerSpec):
    """Muon (Jordan, 2024): an iteration orthogonalizes the momentum matrix. Muon updates matrices, and stacks of
    expert matrices. Each matrix of a stack is orthogonalized separately.

    Attributes:
        momentum: the momentum: a number, a formula in `t`, or a schedule.
        nesterov: whether to use Nesterov momentum.
        method: the iteration. `newton_schulz` is Newton-Schulz with one quintic polynomial. `polar_express` has a
            separate quintic per iteration (Amsel et al. 2025, arXiv 2505.16932). `turbo` is Turbo-Muon, in which a
            scaling of the rows replaces the first iteration (arXiv 2512.04632).
        steps: the number of iterations. With `turbo`, the scaling counts as the first iteration.
        equalize_rows: whether all rows are scaled to the same length before the iterations (MuonEq-R).
        second_moment: the decay of NorMuon's second moment per row (Li et al. 2025, arXiv 2510.05491). The second
            moment rescales the result of the iterations. If unset, there is no second moment.
        coefficients: the numbers (a, b, c) of each iteration X <- a X + (b A + c A^2) X with A = X X^T. Additional
            iterations repeat the last numbers. If unset, `method` determines them.
    """

    slots: ClassVar[int] = 1

    kind: Literal["muon"]
    momentum: UnitRate = 0.95
    nesterov: bool = True
    method: Literal["newton_schulz", "polar_express", "turbo"] = later("newton_schulz")
    steps: Annotated[int, Field(ge=1, le=20)] = 5
    equalize_rows: bool = later(False)
    second_moment: Decay | None = later(None)
    coefficients: Annotated[tuple[Coefficients, ...], Field(min_length=1)] | None = later(None)

    @property
    def of_shape(self) -> float:
        """The number of temporary f32 values that an update allocates per element of the matrices of one shape.

        These are the momentum, the matrix and the next iterate of the matrix, first in f32 and then in bf16. A second
        moment also rescales the direction twice.
        """
        return 2.5 if self.second_moment is None else 4

    def refuses(self, shape: tuple[int, ...]) -> str:
        return "" if len(shape) in (2, 3) else "muon updates only matrices"

    def state_numbers(self, shape: tuple[int, ...]) -> int:
        rows = prod(shape[:-1]) if self.second_moment is not None else 0
        return super().state_numbers(shape) + rows

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        least = LEAST_STEPS.get(self.method, 1)
        if self.steps < least:
            message = f"`steps` is {self.steps}, but {self.method} needs at least {least}"
            yield Problem(("steps",), "S278", message, f"use at least {least}; the default is 5")
        elif self.coefficients is not None:
            yield from self._problems_of_coefficients(self.coefficients, self.steps + 1 - least)

    def _problems_of_coefficients(self, coefficients: tuple[Coefficients, ...], iterations: int) -> Iterator[Problem]:
        if len(coefficients) > iterations:
            only = (
                f"there is only {iterations} iteration"
                if iterations == 1
                else f"there are only {iterations} iterations"
            )
            message = f"`coefficients` has {len(coefficients)} entries, but {only}"
            yield Problem(("coefficients", iterations), "S287", message, "remove the last entries, or raise `steps`")
            return
        for i in range(1, 101):
            value = start = i / 100
            for a, b, c in (*coefficients, *[coefficients[-1]] * (iterations - len(coefficients))):
                value = a * value + b * value**3 + c * value**5
                if abs(value) > 1e6:
                    break
            if abs(value) > LARGEST:
                message = f"the iterations diverge: they map the singular value {start:g} to {value:.4g}"
                hint = f"choose coefficients that map values from 0 to 1 to values near 1, never above {LARGEST:g}"
                yield Problem(("coefficients",), "S287", message, hint)
                return
