"""The learning rate's multiplier and ramped values, as pure functions of steps and seconds.

`step` is the number of updates so far, so the first update has step 0.
"""

import math
from dataclasses import dataclass

from specc.compiler.spec.optimizers.schedules import Ramp, Taper
from specc.compiler.spec.train import ScheduleSpec, TrainSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """The position of a run before an update.

    Attributes:
        multiplier: the factor of learning rates.
        warm_down: the multiplier without its warm-up. Settings that begin late in a run compare with it.
        done: the share of the run that is complete, 0 to 1.
    """

    multiplier: float = 1.0
    warm_down: float = 1.0
    done: float = 0.0


def moment(train: TrainSpec, step: int, seconds: float) -> Moment:
    """Returns the moment after `step` updates and `seconds` of training."""
    return Moment(multiplier(train, step, seconds), warm_down(train, step, seconds), progress(train, step, seconds))


def multiplier(train: TrainSpec, step: int, seconds: float) -> float:
    """Returns the factor of learning rates in the update after `step` others and `seconds` of training."""
    if train.steps is not None:
        return by_steps(train.schedule, train.steps, step)
    assert train.budget_seconds is not None  # the spec has exactly one of the two
    return by_clock(train.schedule, train.budget_seconds, step, seconds)


def warm_down(train: TrainSpec, step: int, seconds: float) -> float:
    """Returns the multiplier without the warm-up: 1, then down to the floor."""
    if train.steps is not None:
        return down_by_steps(train.schedule, train.steps, step)
    assert train.budget_seconds is not None
    return down_by_clock(train.schedule, train.budget_seconds, step, seconds)


def progress(train: TrainSpec, step: int, seconds: float) -> float:
    """Returns the share of the run that is complete, 0 to 1. The run ends at 1."""
    if train.steps is not None:
        return min(1.0, step / train.steps)
    assert train.budget_seconds is not None
    return min(1.0, seconds / train.budget_seconds)


def by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """Returns the multiplier in a run of `steps` updates: it rises linearly to 1 over the warm-up steps, and falls from
    1 to `floor` over the warm-down steps, on a line that reaches 0 just after the last update."""
    return min(_up(step, schedule.of(steps)[0]), down_by_steps(schedule, steps, step))


def down_by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """Returns `by_steps` without the warm-up."""
    return _down(steps - step, schedule.of(steps)[1], schedule.floor)


def by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """Returns the multiplier in a run of `budget` seconds.

    The mean time per step so far converts `warmdown_steps` into seconds, so the warm-down ends with the budget on a
    machine of any speed. With T the budget, t the seconds, s their mean per step and W the warm-down steps, the
    multiplier is 1 while T - t > W s, then max((T - t) / (W s), floor) (parameter-golf's wall-clock schedule). If the
    warm-down is a fraction f, f T replaces W s.

    A warm-up counts steps. If it is a fraction f, it has f T / s steps, by the mean so far. Before the first update
    that mean is unknown, and the multiplier is 0.

    Args:
        schedule: the schedule.
        budget: the length of the run in seconds of training.
        step: the number of updates so far.
        seconds: seconds of training so far.
    """
    warmup: float = schedule.warmup_steps
    if schedule.warmup_fraction:
        warmup = schedule.warmup_fraction * budget * step / seconds if step and seconds else math.inf
    return min(_up(step, warmup), down_by_clock(schedule, budget, step, seconds))


def down_by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """Returns `by_clock` without the warm-up. Args as in `by_clock`."""
    span = schedule.warmdown_steps * seconds / step if step else 0.0
    return _down(max(0.0, budget - seconds), schedule.warmdown_fraction * budget or span, schedule.floor)


def _up(step: int, span: float) -> float:
    # step + 1: with a known span the first update has a multiplier above 0, as an update at 0 would change nothing
    return min(1.0, (step + 1) / span) if span else 1.0


def _down(left: float, span: float, floor: float) -> float:
    # after the last update, which a benchmark can pass, `left` is at most 0
    return max(left / span, floor) if left < span and span else 1.0


def value_at(value: float | Ramp, step: int) -> float:
    """Returns a number unchanged, or the value of a ramp after `step` updates."""
    if isinstance(value, Ramp):
        return value.start + (value.end - value.start) * min(1.0, step / value.steps)
    return value


def tapered(value: float | Taper, done: float) -> float:
    """Returns a number unchanged, or the value of a taper when the share `done` of the run is complete."""
    if isinstance(value, Taper):
        return value.start + (value.end - value.start) * max(0.0, done - value.after) / (1 - value.after)
    return value
