"""The learning rate over a run: warm-up, and warm-down with its shape.

runtime/optim/schedule.py computes the learning rate of a step.
"""

from collections.abc import Iterator
from typing import Literal

from specc.compiler.changing_values import UnitFormula, formula_at
from specc.compiler.strict import NonNegative, Problem, StrictModel, Unit, later

# Named shapes of the warm-down, as formulas. A new name is also a choice of `ScheduleSpec.shape`.
SHAPES = {"cosine": "0.5 * (1 + cos(pi * t))"}


class ScheduleSpec(StrictModel):
    """The multiplier of the learning rate over a run.

    The multiplier rises from 0 to 1 (warm-up), stays 1, then falls (warm-down). Warm-up and warm-down are each stated
    in steps or as a fraction of the run. The run is measured in seconds if `budget_seconds` is set, otherwise in steps.
    If `shape` is set without a length of the warm-down, the warm-down is the whole run after the warm-up.

    Attributes:
        warmup_steps: the number of warm-up steps.
        warmdown_steps: the number of warm-down steps, at the end of the run.
        warmup_fraction: the warm-up as a fraction of the run.
        warmdown_fraction: the warm-down as a fraction of the run.
        shape: the multiplier in the warm-down: `linear`, `cosine`, or a formula such as `(1 - t) ** 2`, where `t` is
            the completed share of the warm-down.
        floor: the lowest multiplier in the warm-down.
    """

    warmup_steps: NonNegative = 0
    warmdown_steps: NonNegative = 0
    warmup_fraction: Unit = 0.0
    warmdown_fraction: Unit = 0.0
    shape: Literal["linear", "cosine"] | UnitFormula = later("linear")
    floor: Unit = 0.0

    @property
    def falls(self) -> bool:
        return self.shape != "linear" and not (self.warmdown_steps or self.warmdown_fraction)

    def of(self, steps: int) -> tuple[int, int]:
        """Returns the numbers of warm-up and warm-down steps in a run of `steps` steps."""
        # in floating point, 0.29 * 100 is slightly less than 29
        parts = (int(part * steps + 1e-6) for part in (self.warmup_fraction, self.warmdown_fraction))
        up, down = (
            max(least, part) for least, part in zip((self.warmup_steps, self.warmdown_steps), parts, strict=True)
        )
        return up, max(steps - up, 0) if self.falls else down

    def down(self, left: float) -> float:
        """Returns the multiplier when the share `left` of the warm-down remains."""
        if self.shape == "linear":
            return max(left, self.floor)
        return max(formula_at(SHAPES.get(self.shape, self.shape), 1 - max(left, 0.0)), self.floor)

    def below(self, limit: float) -> float:
        """Returns the largest remaining share of the warm-down at which the multiplier is at most `limit`. The result
        is correct only for a shape that never rises."""
        low, high = 0.0, 1.0
        if self.shape == "linear":
            return limit
        for _ in range(60):  # bisection to the precision of a float
            middle = (low + high) / 2
            low, high = (middle, high) if self.down(middle) <= limit else (low, middle)
        return low

    def lowest(self, steps: int | None, last: int = 1) -> float:
        """Returns the learning-rate multiplier of one of the last updates of a run.

        Args:
            steps: The steps of the run. None if the run is limited by seconds; the result is then the lowest
                multiplier.
            last: The position of the update, counted from the end: 1 is the last update.
        """
        span = self.warmdown_fraction or self.warmdown_steps or self.falls if steps is None else self.of(steps)[1]
        if not span:
            return 1.0
        return self.down(0.0 if steps is None else min(1.0, last / span))

    def problems(self) -> Iterator[Problem]:
        for name in ("warmup", "warmdown"):
            if getattr(self, f"{name}_steps") and getattr(self, f"{name}_fraction"):
                message = f"`{name}_steps` and `{name}_fraction` are both set"
                yield Problem((f"{name}_fraction",), "S229", message, "remove one of the two")
        values = [self.down(1 - i / 100) for i in range(101)]
        if (rise := next((i for i in range(100) if values[i + 1] > values[i] + 1e-12), None)) is not None:
            message = f"the shape rises at t = {rise / 100:g}, from {values[rise]:.4g} to {values[rise + 1]:.4g}"
            yield Problem(("shape",), "S263", message, "write a formula that falls from 1 as t goes from 0 to 1")
