"""Runs that resume on another number of processes. `make test` has one case: tests/runtime/distributed."""

from pathlib import Path

import pytest
from log_lines import read_log
from started_runs import arguments
from tiers import Trials, soak

from specc.cli.app import run
from specc.runtime.storage import checkpoint

CHANGES = ((8, 4), (4, 8))  # processes before and after step 5
SMALL_BATCH = ("--set", "train.micro_batch=2")  # 16 rows in a step, of which each of eight processes has two


def losses(folder: Path, name: str) -> list[float]:
    records = read_log(folder / name / "log.jsonl")
    return [record["loss"] for record in records if record["event"] == "step"]


@soak("C28", changes_of_ranks=2)
def test_a_run_resumes_on_another_number_of_processes(trials: Trials, tmp_path: Path) -> None:
    """With the same samples: the losses agree to 0.001, and the state of the loader is equal. gloo, on the CPU."""
    assert run(arguments(tmp_path, "one", *SMALL_BATCH)) == 0
    expected = losses(tmp_path, "one")
    for before, after in CHANGES[: trials["changes_of_ranks"]]:
        name = f"{before} to {after}"
        processes = ("--target", "cpu", "--gpus")
        assert run(arguments(tmp_path, name, *SMALL_BATCH, *processes, str(before), "--steps", "5")) == 0
        assert run(arguments(tmp_path, name, *SMALL_BATCH, *processes, str(after), "--resume", "auto")) == 0
        starts = [record for record in read_log(tmp_path / name / "log.jsonl") if record["event"] == "start"]
        assert [(start["step"], start["processes"]) for start in starts] == [(0, before), (5, after)]
        assert losses(tmp_path, name) == pytest.approx(expected, abs=1e-3)
        last = (tmp_path / run_name / "checkpoints/step_00000012" for run_name in (name, "one"))
        ours, theirs = (checkpoint.load(path) for path in last)
        assert ours.loader == theirs.loader and ours.step == theirs.step == 12
