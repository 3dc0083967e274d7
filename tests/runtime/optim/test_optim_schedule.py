"""The schedules against their formulas, at the ends and in between."""

import math
import random
from collections.abc import Callable

import pytest

from specc.compiler.changing_values import RateSchedule, UnitSchedule
from specc.compiler.spec.learning_rate import ScheduleSpec
from specc.compiler.spec.train import TrainSpec
from specc.runtime.optim.schedule import Moment, moment, value_at

COMMON = {"tokens_per_step": 8, "optimizers": ({"kind": "adamw", "match": "*", "lr": 0.1},)}


def by_steps(schedule: ScheduleSpec, steps: int, step: int) -> float:
    train = TrainSpec.model_validate({**COMMON, "steps": steps, "schedule": schedule})
    return moment(train, step, 1e9).multiplier


def by_clock(schedule: ScheduleSpec, budget: float, step: int, seconds: float) -> float:
    train = TrainSpec.model_validate({**COMMON, "budget_seconds": budget, "schedule": schedule})
    return moment(train, step, seconds).multiplier


def test_a_fraction_of_a_run_is_a_whole_number_of_steps_where_people_say_so() -> None:
    """In floats 0.29 * 100 is a little less than 29."""
    for steps in (10, 20, 50, 100, 200, 1000):
        for percent in range(1, 100):
            result = ScheduleSpec(warmdown_fraction=percent / 100).of(steps)
            assert result == (0, percent * steps // 100), (percent, steps)


def test_by_steps_goes_up_stays_and_goes_down() -> None:
    schedule = ScheduleSpec(warmup_steps=4, warmdown_steps=5, floor=0.3)
    results = [by_steps(schedule, 12, step) for step in range(12)]
    assert results == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.3])


def test_shares_are_steps_of_the_run_that_it_is() -> None:
    for steps, up, down in ((12, 3, 6), (400, 100, 200), (3, 0, 1)):
        shares, counted = (
            ScheduleSpec(warmup_fraction=0.25, warmdown_fraction=0.5, floor=0.1),
            ScheduleSpec(warmup_steps=up, warmdown_steps=down, floor=0.1),
        )
        results = [by_steps(shares, steps, step) for step in range(steps)]
        assert results == [by_steps(counted, steps, step) for step in range(steps)]


def test_without_warm_up_and_warm_down_it_is_one_throughout() -> None:
    assert [by_steps(ScheduleSpec(), 3, step) for step in range(6)] == [1] * 6  # a bench goes on behind the last
    assert [by_clock(ScheduleSpec(), 3.0, step, float(step)) for step in range(5)] == [1, 1, 1, 1, 1]


def test_by_clock_is_the_formula_of_the_challenge() -> None:
    draw = random.Random(5)
    seen = set()
    for _ in range(2000):
        budget, mean, warmdown = draw.uniform(10, 600), draw.uniform(0.05, 0.5), draw.randint(1, 4000)
        step = draw.randint(1, int(1.1 * budget / mean))
        seconds, floor = step * mean, draw.choice([0.0, 0.05])
        left = budget - seconds
        wanted = 1.0 if left > warmdown * mean else max(left / (warmdown * mean), floor)
        result = by_clock(ScheduleSpec(warmdown_steps=warmdown, floor=floor), budget, step, seconds)
        assert result == pytest.approx(max(wanted, 0.0), abs=1e-9)
        seen.add("one" if result == 1 else "floor" if result == floor else "between")
    assert seen == {"one", "floor", "between"}


def test_the_clock_of_the_anchor_run() -> None:
    """600 s, 4000 steps, 87.7 ms: warm-down begins near 249 s and reaches the floor 17.5 s before the end."""
    schedule = ScheduleSpec(warmdown_steps=4000, floor=0.05)

    def at(seconds: float) -> float:
        return by_clock(schedule, 600.0, round(seconds / 0.0877), seconds)

    assert at(248.5) == 1 and 0.99 < at(250.0) < 1
    assert at(582.0) > 0.05 and at(582.9) == 0.05


def test_by_clock_warms_up_by_steps() -> None:
    schedule = ScheduleSpec(warmup_steps=4, warmdown_steps=2)
    assert [by_clock(schedule, 100.0, step, 0.1 * step) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]


def test_the_spec_decides_which_of_the_two() -> None:
    schedule = {"warmdown_steps": 10}
    steps = TrainSpec.model_validate({**COMMON, "steps": 20, "schedule": schedule})
    clock = TrainSpec.model_validate({**COMMON, "budget_seconds": 20.0, "schedule": schedule})
    for now in (moment(steps, 15, 1e9), moment(clock, 15, 15.0)):
        assert now.multiplier == 0.5 and now.done == 0.75
    assert moment(steps, 20, 0.0).done == moment(clock, 1, 21.0).done == 1


def test_points_by_steps_are_joined_by_lines_and_stay() -> None:
    ramp = UnitSchedule(at=((0, 0.92), (1500, 0.99)), by="step")
    assert value_at(ramp, Moment(step=0)) == 0.92
    assert value_at(ramp, Moment(step=750)) == pytest.approx(0.955)
    assert value_at(ramp, Moment(step=1500)) == value_at(ramp, Moment(step=99999)) == 0.99
    assert value_at(0.95, Moment(step=7)) == 0.95


def test_points_by_shares_are_lines_or_steps() -> None:
    # that of parameter-golf PR 1729: to half over the last 30 %
    line = RateSchedule(at=((0, 0.095), (0.7, 0.095), (1, 0.0475)))
    assert value_at(line, Moment(done=0.0)) == value_at(line, Moment(done=0.7)) == 0.095
    assert value_at(line, Moment(done=0.85)) == pytest.approx(0.75 * 0.095)
    assert value_at(line, Moment(done=1.0)) == 0.0475
    held = RateSchedule(at=((0, 0.5), (0.3, 0.25), (0.6, 0.0)), between="step")
    assert [value_at(held, Moment(done=done)) for done in (0, 0.29, 0.3, 0.59, 0.6, 1)] == [0.5, 0.5, 0.25, 0.25, 0, 0]


def test_formulas_are_of_the_share_of_the_run() -> None:
    for done in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert value_at("0.2 * (1 - t) ** 2", Moment(done=done)) == pytest.approx(0.2 * (1 - done) ** 2)
        cosine = 0.05 * (1 + math.cos(math.pi * done))
        assert value_at("0.05 * (1 + cos(pi * t))", Moment(done=done)) == pytest.approx(cosine, abs=1e-15)


@pytest.mark.parametrize(
    "shape, wanted",
    [
        ("cosine", lambda t: 0.5 * (1 + math.cos(math.pi * t))),
        ("1 - sqrt(t)", lambda t: 1 - math.sqrt(t)),
        ("(1 - t) ** 1.5", lambda t: (1 - t) ** 1.5),
    ],
)
def test_the_warm_down_has_the_shape_of_the_spec(shape: str, wanted: Callable[[float], float]) -> None:
    """Over its own span, or over all of the run after the warm-up; the floor bounds it below."""
    part = ScheduleSpec(warmup_steps=4, warmdown_steps=10, shape=shape)
    results = [by_steps(part, 20, step) for step in range(20)]
    assert results == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 7, *(wanted(i / 10) for i in range(10))])
    rest = ScheduleSpec(warmup_steps=4, shape=shape, floor=0.1)
    results = [by_steps(rest, 20, step) for step in range(20)]
    assert results == pytest.approx([0.25, 0.5, 0.75, 1, *(max(wanted(i / 16), 0.1) for i in range(16))])
    clock = ScheduleSpec(shape=shape)
    assert by_clock(clock, 40.0, 3, 10.0) == pytest.approx(wanted(0.25))


@pytest.mark.parametrize("shape", ["linear", "cosine", "(1 - t) ** 2"])
def test_a_limit_is_reached_where_the_shape_reaches_it(shape: str) -> None:
    schedule = ScheduleSpec(warmdown_steps=1000, shape=shape)
    for limit in (0.9, 0.5, 0.15):
        left = schedule.below(limit)
        assert schedule.down(left) <= limit and schedule.down(left + 1e-9) >= limit - 1e-12


@pytest.mark.parametrize("length", [{"steps": 40}, {"budget_seconds": 40.0}])
def test_a_warm_down_by_fraction_is_the_same_by_steps_and_by_the_clock(length: dict[str, float]) -> None:
    """Over the last 3/4 of the run, whatever a step takes; the floor and the warm-up hold."""
    schedule = {"warmdown_fraction": 0.75, "floor": 0.1, "warmup_steps": 4}
    train = TrainSpec.model_validate({**COMMON, **length, "schedule": schedule})
    for step in range(41):
        wanted = min(1.0, (step + 1) / 4, max((40 - step) / 30, 0.1))
        assert moment(train, step, float(step)).multiplier == pytest.approx(wanted)


def test_a_warm_up_by_fraction_goes_by_the_clock_too() -> None:
    """Over the first quarter of 40 s, at 0.5 s an update: 20 of them. What the first takes is not known before it."""
    schedule = ScheduleSpec(warmup_fraction=0.25)
    results = [by_clock(schedule, 40.0, step, 0.5 * step) for step in range(30)]
    assert results == pytest.approx([0.0, *((step + 1) / 20 for step in range(1, 20)), *[1.0] * 10])
    slower = [by_clock(schedule, 40.0, step, 2.0 * step) for step in range(8)]
    assert slower == pytest.approx([0.0, 0.4, 0.6, 0.8, *[1.0] * 4])
    assert by_clock(schedule, 40.0, 0, 1e-4) == 0.0  # the clock runs when the first update begins


def test_what_begins_late_does_not_begin_in_the_warm_up() -> None:
    schedule = {"warmup_steps": 10, "warmdown_steps": 10}
    train = TrainSpec.model_validate({**COMMON, "steps": 20, "schedule": schedule})
    moments = [moment(train, step, 0.0) for step in range(20)]
    assert [at.multiplier for at in moments[:3]] == [0.1, 0.2, 0.3]
    assert [at.warm_down < 0.35 for at in moments] == [False] * 17 + [True] * 3
    assert moments[15].multiplier == moments[15].warm_down == 0.5 and moments[15].done == 0.75
