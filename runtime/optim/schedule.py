"""Scheduled numbers, such as the learning-rate multiplier, as functions of steps and seconds.

In this module, `step` is the number of previous updates, so the first update has step 0. compiler/changing_values.py
defines the schedules and formulas of a spec.
"""

import math
from dataclasses import dataclass

from specc.compiler.changing_values import Schedule, rate_at
from specc.compiler.spec.train import TrainSpec


@dataclass(frozen=True, slots=True)
class Moment:
    """The progress of a run before an update.

    Attributes:
        multiplier: the factor by which all learning rates are multiplied.
        warm_down: the value that `multiplier` would have without a warm-up. Some settings, such as weight averages,
            take effect when this value falls below a limit.
        done: the completed fraction of the run, from 0 to 1.
        step: the number of previous updates.
    """

    multiplier: float = 1.0
    warm_down: float = 1.0
    done: float = 0.0
    step: int = 0


def moment(train: TrainSpec, step: int, seconds: float) -> Moment:
    """Returns the progress of a run after `step` updates and `seconds` of training.

    The multiplier rises linearly to 1 during the warm-up, and falls to `floor` during the warm-down. The warm-down ends
    with the last update, or with the time budget if the spec has `budget_seconds`.

    For a run with `budget_seconds`, let `T` be the budget in seconds, and let `s` be the mean number of seconds per
    step so far. A warm-down of `W` steps takes `W * s` seconds. A warm-down that is a fraction `f` of the run takes
    `f * T` seconds. A warm-up that is a fraction `f` of the run has `f * T / s` steps. Before the first update, `s` is
    unknown, so the multiplier is 0 if the warm-up is a fraction.
    """
    schedule, warmup, warmdown = train.schedule, 0.0, 0.0
    if train.steps is not None:
        warmup, warmdown = schedule.of(train.steps)
        left, done = float(train.steps - step), step / train.steps
    else:
        assert train.budget_seconds is not None  # a spec has either `steps` or `budget_seconds`
        budget, warmup = train.budget_seconds, schedule.warmup_steps
        if schedule.warmup_fraction:
            warmup = schedule.warmup_fraction * budget * step / seconds if step and seconds else math.inf
        warmdown = (1 - schedule.warmup_fraction if schedule.falls else schedule.warmdown_fraction) * budget
        if not warmdown and step:
            warmdown = schedule.warmdown_steps * seconds / step
        left, done = max(0.0, budget - seconds), seconds / budget
    # The multiplier of the first update is above 0, because an update with the multiplier 0 would change nothing
    up = min(1.0, (step + 1) / warmup) if warmup else 1.0
    # A benchmark may continue after the last update. Then `left` is at most 0.
    down = schedule.down(left / warmdown) if warmdown and left < warmdown else 1.0
    return Moment(min(up, down), down, min(1.0, done), step)


def value_at(rate: float | str | Schedule, now: Moment) -> float:
    """Returns the value of a setting in the update at `now`. The setting is a number, a formula or a schedule."""
    return rate_at(rate, now.done, now.step)
