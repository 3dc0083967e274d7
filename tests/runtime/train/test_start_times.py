"""The phases of a start, in the log of a run."""

import time
from pathlib import Path

import pytest
from log_lines import read_log
from run_samples import small_spec, write_text

from specc.runtime.support import native
from specc.runtime.train.start_times import StartTimes
from specc.runtime.train.train import TrainOptions, train


def test_phases_add_up_and_waiting_for_nvcc_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(native, "waited", [3.0])
    times = StartTimes(began=8.0)
    times.mark("imports")
    now[0] += 7.0
    native.waited[0] += 4.0
    times.mark("trace")
    now[0] += 1.5
    times.mark("warm_up")
    now[0] += 1.0
    native.waited[0] += 0.5
    times.mark("trace")
    now[0] += 0.25
    assert not times.ended
    phases = {"imports": 2.0, "trace": 3.5, "nvcc": 4.5, "warm_up": 1.5, "first_step": 0.25}
    assert times.end() == {**phases, "seconds": sum(phases.values())} and times.ended


def test_each_start_of_a_run_is_logged_once(tmp_path: Path) -> None:
    data = str(write_text(tmp_path / "data"))
    for steps, began in ((2, time.monotonic() - 5), (3, None), (3, None)):
        options = TrainOptions(
            small_spec("train.steps=4"), "cpu", data, tmp_path / "run", resume="auto", stop_after_steps=steps,
            cache=tmp_path / "cache", began=began,
        )  # fmt: skip
        train(options, lambda line: None)
    starts = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["event"] == "start_up"]
    assert [record["step"] for record in starts] == [1, 3]  # the last start made no step
    for record in starts:
        phases = {name: value for name, value in record.items() if name not in ("event", "step", "seconds")}
        assert sum(phases.values()) == pytest.approx(record["seconds"]) and min(phases.values()) >= 0
        assert {"data", "build", "model", "first_step"} <= phases.keys()
    assert starts[0]["imports"] >= 5 and "imports" not in starts[1]
