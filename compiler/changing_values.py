"""Spec fields whose value changes during a run. A field has a list of points, or a formula of time.

runtime/optim/schedule.py computes the values at a step of a run.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from specc.compiler.expr import ExprError, number, parse, variables
from specc.compiler.strict import ExprText, NonNegativeFloat, Path, Positive, Problem, StrictModel, Unit

M = TypeVar("M", bound=StrictModel)
MOST = 64  # the most points of a schedule
TIMES = 101  # the number of shares of a run at which a formula is checked


class Schedule(StrictModel):
    """A value that changes during training. The value is constant after the last point.

    Attributes:
        at: [time, value] pairs. The first time is 0, and times increase.
        by: the unit of the times. `share`: the completed share of the run, from 0 to 1. The share is measured by
            seconds if `budget_seconds` is set, otherwise by steps. `step`: the number of updates. `epoch`: the number
            of passes over the training data.
        between: how the value between two points is computed. `step`: the value of the earlier point applies. `linear`:
            by linear interpolation.
    """

    at: tuple[tuple[float, Any], ...]
    by: Literal["share", "step", "epoch"] = "share"
    between: Literal["linear", "step"] = "step"

    def value(self, time: float) -> Any:
        """Returns the value at `time`. The field `by` is the unit of `time`."""
        after = bisect_right(self.at, time, key=lambda point: point[0])
        begin, value = self.at[after - 1]
        if self.between == "step" or after == len(self.at):
            return value
        end, next_value = self.at[after]
        return value + (next_value - value) * ((time - begin) / (end - begin))

    def problems(self) -> Iterator[Problem]:
        times = [time for time, _ in self.at]
        if times[0] != 0 or sorted(set(times)) != times:
            message = (
                f"the times of points must start at 0 and increase, but are {', '.join(f'{time:g}' for time in times)}"
            )
            yield Problem(
                ("at",), "S250", message, "start at time 0, and give each point a later time than the point before it"
            )
        elif self.by == "share" and (times[-1] > 1 or (self.between == "step" and times[-1] == 1)):
            limit = "below" if self.between == "step" else "at most"
            message = f"the time of the last point is {times[-1]:g}, but a time is a share of the run, {limit} 1"
            hint = "write an earlier time, or use `by: step` for times in updates"
            yield Problem(("at", len(times) - 1, 0), "S250", message, hint)

    @property
    def words(self) -> str:
        """The points in words, such as `0.92 at 0, 0.99 at step 1500, linear`."""
        points = [
            f"{value} at {f'{time:.4g}' if self.by == 'share' else f'{self.by} {time:g}'}" for time, value in self.at
        ]
        return ", ".join([*points, *(["linear"] if self.between == "linear" else [])])

    @property
    def changes(self) -> tuple[tuple[int, float], ...]:
        """The points at which a new value or a new slope begins, as pairs (index of the point, completed share of the
        run). With `between: step`, these are all points but the first. With `between: linear`, they are all points but
        the last. The result is empty if the unit `by` of the times is not `share`."""
        points = enumerate(time for time, _ in self.at)
        if self.by != "share":
            return ()
        return tuple(points)[1:] if self.between == "step" else tuple(points)[:-1]


def points_of(schedule: object) -> tuple[tuple[float, Any], ...]:
    """Returns the (time, value) points of a schedule. A constant has one point, at time 0."""
    return schedule.at if isinstance(schedule, Schedule) else ((0.0, schedule),)


def values_of(field: str, value: object) -> Iterator[tuple[Path, Any]]:
    """Yields each value of a spec field that may be a schedule, with the path of the value. `field` is the name of the
    field, with which the paths begin. A constant is the only value of its field. If `value` is None, yields nothing."""
    if isinstance(value, Schedule):
        yield from (((field, "at", i, 1), point) for i, (_, point) in enumerate(value.at))
    elif value is not None:
        yield (field,), value


def last(value: Any) -> Any:
    """Returns the last value if `value` is a schedule, otherwise `value` itself."""
    return points_of(value)[-1][1]


def change_shares(part: StrictModel) -> tuple[float, ...]:
    """Returns the times of the points of all schedules in `part`, except 0, in ascending order. The times are fractions
    of the run."""
    return tuple(sorted({share for at in _points_in(part.stated()) for share, _ in at if share}))


def settled(part: M, share: float) -> M:
    """Returns a copy of `part` in which each schedule is replaced by the schedule's value at the fraction `share` of
    the run."""
    data = part.stated()
    if not any(_points_in(data)):
        return part
    return type(part).model_validate_json(json.dumps(_settled(data, share)))


def _points(data: Any) -> Any:
    at = data.get("at") if isinstance(data, dict) and data.keys() <= Schedule.model_fields.keys() else None
    return at if isinstance(at, list) else None


def _points_in(data: Any) -> Iterator[Any]:
    if (at := _points(data)) is not None:
        yield at
    elif isinstance(data, dict | list):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _points_in(item)


def _settled(data: Any, share: float) -> Any:
    if (at := _points(data)) is not None:
        return next(value for begin, value in reversed(at) if begin <= share)
    if isinstance(data, dict):
        return {key: _settled(item, share) for key, item in data.items()}
    return [_settled(item, share) for item in data] if isinstance(data, list) else data


def formula_at(text: str, t: float) -> float:
    return number(parse(text, ("t", "pi")), t=t, pi=math.pi)


def formula(most: float = math.inf) -> AfterValidator:
    """Returns a validator of formulas in `t`. The value of a valid formula is from 0 to `most` for all `t` from 0 to
    1."""

    def check(text: str) -> str:
        if "t" not in variables(parse(text, ("t", "pi"))):
            raise ExprError(
                f"`{text}` is text, but not a formula in t", hint="write a number without quotes, or a formula in `t`"
            )
        for i in range(TIMES):
            t = i / (TIMES - 1)
            try:
                value = formula_at(text, t)
            except ExprError as error:
                if not error.message.endswith("a finite number"):  # a syntax error, whose column is known
                    raise
                raise ExprError(
                    f"{error.message}, at t = {t:g}", hint="change the formula; t goes from 0 to 1"
                ) from None
            if not -1e-12 <= value <= most:
                limit = "at least 0" if value < 0 else f"at most {most:g}"
                hint = f"for t from 0 to 1, the value must be {limit}"
                raise ExprError(f"the value is {value:g} at t = {t:g}", hint=hint)
        return text

    return AfterValidator(check)


Formula = Annotated[ExprText, formula()]
UnitFormula = Annotated[ExprText, formula(1.0)]
Points = Annotated[tuple[tuple[NonNegativeFloat, NonNegativeFloat], ...], Field(min_length=1, max_length=MOST)]
UnitPoints = Annotated[tuple[tuple[NonNegativeFloat, Unit], ...], Field(min_length=1, max_length=MOST)]
SizePoints = Annotated[tuple[tuple[Unit, Positive], ...], Field(min_length=1, max_length=MOST)]


class RateSchedule(Schedule):
    """A number that changes during training, such as a learning rate."""

    at: Points
    by: Literal["share", "step"] = "share"
    between: Literal["linear", "step"] = "linear"


class UnitSchedule(RateSchedule):
    """A number from 0 to 1 that changes during training."""

    at: UnitPoints


class WeightSchedule(RateSchedule):
    """The weight of a loss, which changes during training."""

    between: Literal["linear", "step"] = "step"


class ForcingSchedule(Schedule):
    """The probability of teacher forcing, which changes during training."""

    at: UnitPoints


class SegmentSchedule(Schedule):
    """A schedule whose value changes only at the points. Programs for each value are compiled before the run's clock
    starts."""

    by: Literal["share"] = "share"
    between: Literal["step"] = "step"


class SizeSchedule(SegmentSchedule):
    """A size that changes during training."""

    at: SizePoints


Rate = NonNegativeFloat | Formula | RateSchedule
UnitRate = Unit | UnitFormula | UnitSchedule
Weight = NonNegativeFloat | Formula | WeightSchedule
Sizes = Positive | SizeSchedule


def rate_at(rate: float | str | Schedule, share: float, step: int) -> float:
    """Returns the value of a number, a formula or a schedule.

    Args:
        rate: A number, a formula, or a schedule. The variable of a formula is the completed share of the run.
        share: The completed share of the run, from 0 to 1.
        step: The number of updates so far.
    """
    if isinstance(rate, Schedule):
        return float(rate.value(share if rate.by == "share" else step))
    return max(formula_at(rate, share), 0.0) if isinstance(rate, str) else rate
