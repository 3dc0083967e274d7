"""The learning-rate multiplier and other scheduled numbers, as pure functions of steps and seconds.

compiler/changing_values.py defines the schedules and formulas of a spec.
`step` is the number of updates so far, so the first update has step 0.
"""

import math
from dataclasses import dataclass

from specc.compiler.changing_values import Schedule, rate_at
from specc.compiler.spec.train import TrainSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """The position of a run before an update.

    Attributes:
        multiplier: the factor of learning rates.
        warm_down: the multiplier without the warm-up. Settings that begin late in a run begin when this value falls
            below a limit.
        done: the completed share of the run, 0 to 1.
        step: the number of updates so far.
    """

    multiplier: float = 1.0
    warm_down: float = 1.0
    done: float = 0.0
    step: int = 0


def moment(train: TrainSpec, step: int, seconds: float) -> Moment:
    """Returns the position of the run after `step` updates and `seconds` of training.

    The multiplier rises linearly to 1 over the warm-up, and falls from 1 to at least `floor` over the warm-down, in the
    shape that the schedule states. In a run that is limited by steps, the warm-down ends just after the last update.

    In a run limited by `budget_seconds`, the mean time per step so far converts `warmdown_steps` into seconds, so the
    warm-down ends with the budget on a machine of any speed. Let T be the budget, t the seconds so far, s the mean
    seconds per step, and W the warm-down steps. The multiplier is 1 while T - t > W s, and then max((T - t) / (W s),
    floor), as in the wall-clock schedule of parameter-golf. If the warm-down is given as a fraction f, f T replaces W
    s. If the warm-up is given as a fraction f, it has f T / s steps. Before the first update, s is unknown and the
    multiplier is 0.
    """
    schedule, warmup, warmdown = train.schedule, 0.0, 0.0
    if train.steps is not None:
        warmup, warmdown = schedule.of(train.steps)
        left, done = float(train.steps - step), step / train.steps
    else:
        assert train.budget_seconds is not None  # the spec has exactly one of the two
        budget, warmup = train.budget_seconds, schedule.warmup_steps
        if schedule.warmup_fraction:
            warmup = schedule.warmup_fraction * budget * step / seconds if step and seconds else math.inf
        warmdown = (1 - schedule.warmup_fraction if schedule.falls else schedule.warmdown_fraction) * budget
        if not warmdown and step:
            warmdown = schedule.warmdown_steps * seconds / step
        left, done = max(0.0, budget - seconds), seconds / budget
    # step + 1, because an update with a multiplier of 0 would change nothing
    up = min(1.0, (step + 1) / warmup) if warmup else 1.0
    # after the last update, where a benchmark may continue, `left` is at most 0
    down = schedule.down(left / warmdown) if warmdown and left < warmdown else 1.0
    return Moment(min(up, down), down, min(1.0, done), step)


def value_at(rate: float | str | Schedule, now: Moment) -> float:
    """Returns the value of a number, a formula or a schedule in the update at `now`."""
    return rate_at(rate, now.done, now.step)
