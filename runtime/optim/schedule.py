"""The learning rate's multiplier and ramped values, as pure functions of steps and seconds.

`step` counts the updates made so far, so the first update sees step 0.
"""

from specc.compiler.train_spec import Ramp, ScheduleSpec, TrainSpec


def multiplier(train: TrainSpec, step: int, seconds: float) -> float:
    """What learning rates are multiplied by in the update after `step` of them and `seconds` of training."""
    if train.steps is not None:
        return by_steps(train.schedule, train.steps, step)
    assert train.budget_seconds is not None  # the spec has exactly one of the two
    return by_clock(train.schedule, train.budget_seconds, step, seconds)


def progress(train: TrainSpec, step: int, seconds: float) -> float:
    """The share of the run that is done, 0 to 1; at 1 it ends."""
    if train.steps is not None:
        return min(1.0, step / train.steps)
    assert train.budget_seconds is not None
    return min(1.0, seconds / train.budget_seconds)


def by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """A run of `steps` updates: up in a straight line over the steps of the warm-up, which end at 1, and down
    to `floor` over those of the warm-down, which begin at 1 and aim at 0 just after the last update."""
    left, (warmup, warmdown) = steps - step, schedule.of(steps)
    down = 1.0 if left >= warmdown else max(left / warmdown, schedule.floor)
    return min(_warm_up(warmup, step), down)


def by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    """A run of `budget` seconds: `warmdown_steps` is turned into seconds by the mean time of a step so far,
    so the warm-down ends with the budget on a machine of any speed.

    With T the budget, t the seconds, s their mean by step and W the warm-down: 1 while T - t > W s, then
    max((T - t) / (W s), floor) (parameter-golf's wall-clock schedule).
    """
    left = max(0.0, budget - seconds)
    span = schedule.warmdown_steps * seconds / step if step else 0.0
    down = 1.0 if left >= span else max(left / span, schedule.floor)
    return min(_warm_up(schedule.warmup_steps, step), down)


def value_at(value: float | Ramp, step: int) -> float:
    """A number, or where its ramp stands after `step` updates."""
    if isinstance(value, Ramp):
        return value.start + (value.end - value.start) * min(1.0, step / value.steps)
    return value


def _warm_up(steps: int, step: int) -> float:
    # the first update is already above 0: at 0 it would be a step that learns nothing
    return min(1.0, (step + 1) / steps) if steps else 1.0
