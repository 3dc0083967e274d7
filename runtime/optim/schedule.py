"""The learning rate's multiplier and ramped values, as pure functions of steps and seconds.

`step` counts the updates made so far, so the first update sees step 0.
"""

import math
from dataclasses import dataclass

from specc.compiler.spec.optimizers.schedules import Ramp, Taper
from specc.compiler.spec.train import ScheduleSpec, TrainSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run stands before an update.

    Attributes:
        multiplier: the factor of learning rates.
        warm_down: the multiplier without its warm-up, by which settings begin late in a run.
        done: the share of the run that is behind, 0 to 1.
    """

    multiplier: float = 1.0
    warm_down: float = 1.0
    done: float = 0.0


def moment(train: TrainSpec, step: int, seconds: float) -> Moment:
    """The moment after `step` updates and `seconds` of training."""
    return Moment(multiplier(train, step, seconds), warm_down(train, step, seconds), progress(train, step, seconds))


def multiplier(train: TrainSpec, step: int, seconds: float) -> float:
    """The factor of learning rates in the update after `step` others and `seconds` of training."""
    if train.steps is not None:
        return by_steps(train.schedule, train.steps, step)
    assert train.budget_seconds is not None  # the spec has exactly one of the two
    return by_clock(train.schedule, train.budget_seconds, step, seconds)


def warm_down(train: TrainSpec, step: int, seconds: float) -> float:
    """The multiplier as if there were no warm-up: 1, then down to the floor."""
    if train.steps is not None:
        return down_by_steps(train.schedule, train.steps, step)
    assert train.budget_seconds is not None
    return down_by_clock(train.schedule, train.budget_seconds, step, seconds)


def progress(train: TrainSpec, step: int, seconds: float) -> float:
    """The share of the run that is done, 0 to 1; at 1 it ends."""
    if train.steps is not None:
        return min(1.0, step / train.steps)
    assert train.budget_seconds is not None
    return min(1.0, seconds / train.budget_seconds)


def by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """A run of `steps` updates: up in a straight line over the steps of the warm-up, which end at 1, and down
    to `floor` over those of the warm-down, which begin at 1 and aim at 0 just after the last update."""
    return min(_up(step, schedule.of(steps)[0]), down_by_steps(schedule, steps, step))


def down_by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """`by_steps` without the warm-up."""
    return _down(steps - step, schedule.of(steps)[1], schedule.floor)


def by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """A run of `budget` seconds: `warmdown_steps` is turned into seconds by the mean time of a step so far,
    so the warm-down ends with the budget on a machine of any speed.

    With T the budget, t the seconds, s their mean by step and W the warm-down: 1 while T - t > W s, then
    max((T - t) / (W s), floor) (parameter-golf's wall-clock schedule). A warm-down of the fraction f has f T in place
    of W s. A warm-up goes by steps; one of the fraction f is f T / s of them, by the mean so far. Before the first
    update that is not known, so that it has the multiplier 0.
    """
    warmup: float = schedule.warmup_steps
    if schedule.warmup_fraction:
        warmup = schedule.warmup_fraction * budget * step / seconds if step and seconds else math.inf
    return min(_up(step, warmup), down_by_clock(schedule, budget, step, seconds))


def down_by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """`by_clock` without the warm-up."""
    span = schedule.warmdown_steps * seconds / step if step else 0.0
    return _down(max(0.0, budget - seconds), schedule.warmdown_fraction * budget or span, schedule.floor)


def _up(step: int, span: float) -> float:
    # the first update is already above 0, where the span is known: at 0 it would be a step that learns nothing
    return min(1.0, (step + 1) / span) if span else 1.0


def _down(left: float, span: float, floor: float) -> float:
    # behind the last update, where a bench goes on, nothing is left
    return max(left / span, floor) if left < span and span else 1.0


def value_at(value: float | Ramp, step: int) -> float:
    """A number, or where its ramp stands after `step` updates."""
    if isinstance(value, Ramp):
        return value.start + (value.end - value.start) * min(1.0, step / value.steps)
    return value


def tapered(value: float | Taper, done: float) -> float:
    """A number, or where its taper stands when the share `done` of the run is behind."""
    if isinstance(value, Taper):
        return value.start + (value.end - value.start) * max(0.0, done - value.after) / (1 - value.after)
    return value
