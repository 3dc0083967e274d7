"""The learning rate's multiplier and ramped values, as pure functions of steps and seconds.

`step` counts the updates made so far, so the first update sees step 0.
"""

from dataclasses import dataclass

from specc.compiler.optimizer_spec import Ramp, Taper
from specc.compiler.train_spec import ScheduleSpec, TrainSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run stands before an update.

    Attributes:
        multiplier: what learning rates are multiplied by.
        warm_down: the multiplier without its warm-up: what begins late in a run goes by it.
        done: the share of the run that is behind, 0 to 1.
    """

    multiplier: float = 1.0
    warm_down: float = 1.0
    done: float = 0.0


def moment(train: TrainSpec, step: int, seconds: float) -> Moment:
    """The moment after `step` updates and `seconds` of training."""
    return Moment(multiplier(train, step, seconds), warm_down(train, step, seconds), progress(train, step, seconds))


def multiplier(train: TrainSpec, step: int, seconds: float) -> float:
    """What learning rates are multiplied by in the update after `step` of them and `seconds` of training."""
    return min(_warm_up(train.schedule, step), warm_down(train, step, seconds))


def warm_down(train: TrainSpec, step: int, seconds: float) -> float:
    """The multiplier as if there were no warm-up: 1, then down to the floor."""
    schedule = train.schedule
    if schedule.warmdown_share is not None:
        left = 1 - progress(train, step, seconds)
        return 1.0 if left >= schedule.warmdown_share else max(left / schedule.warmdown_share, schedule.floor)
    if train.steps is not None:
        return down_by_steps(schedule, train.steps, step)
    assert train.budget_seconds is not None  # the spec has exactly one of the two
    return down_by_clock(schedule, train.budget_seconds, step, seconds)


def progress(train: TrainSpec, step: int, seconds: float) -> float:
    """The share of the run that is done, 0 to 1; at 1 it ends."""
    if train.steps is not None:
        return min(1.0, step / train.steps)
    assert train.budget_seconds is not None
    return min(1.0, seconds / train.budget_seconds)


def by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """A run of `steps` updates: up in a straight line over the first `warmup_steps`, which end at 1, and down
    to `floor` over the last `warmdown_steps`, which begin at 1 and aim at 0 just after the last update."""
    return min(_warm_up(schedule, step), down_by_steps(schedule, steps, step))


def down_by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """`by_steps` without the warm-up."""
    left = steps - step
    return 1.0 if left >= schedule.warmdown_steps else max(left / schedule.warmdown_steps, schedule.floor)


def by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """A run of `budget` seconds: `warmdown_steps` is turned into seconds by the mean time of a step so far,
    so the warm-down ends with the budget on a machine of any speed.

    With T the budget, t the seconds, s their mean by step and W the warm-down: 1 while T - t > W s, then
    max((T - t) / (W s), floor) (parameter-golf's wall-clock schedule).
    """
    return min(_warm_up(schedule, step), down_by_clock(schedule, budget, step, seconds))


def down_by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """`by_clock` without the warm-up."""
    left = max(0.0, budget - seconds)
    span = schedule.warmdown_steps * seconds / step if step else 0.0
    return 1.0 if left >= span else max(left / span, schedule.floor)


def value_at(value: float | Ramp, step: int) -> float:
    """A number, or where its ramp stands after `step` updates."""
    if isinstance(value, Ramp):
        return value.start + (value.end - value.start) * min(1.0, step / value.steps)
    return value


def _warm_up(schedule: ScheduleSpec, step: int) -> float:
    # the first update is already above 0: at 0 it would be a step that learns nothing
    return min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0


def tapered(value: float | Taper, done: float) -> float:
    """A number, or where its taper stands when the share `done` of the run is behind."""
    if isinstance(value, Taper):
        return value.start + (value.end - value.start) * max(0.0, done - value.after) / (1 - value.after)
    return value
