"""`specc train` before its first step, and with a closed output."""

import subprocess
import sys
from pathlib import Path

import pytest
from log_lines import read_log
from ranks import environment
from run_samples import SMALL, SPEC, add_checkpoint, make_run, small_spec, write_text

from specc.cli.app import run
from specc.runtime.storage.run_directory import is_run
from specc.runtime.train.train import TrainOptions, train

SETS = [word for text in SMALL for word in ("--set", text)]


def test_data_that_are_not_there_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `--resume auto` begins where training began before, not in the folder of a mistake."""
    monkeypatch.chdir(tmp_path)
    for where in ([], ["--run", "mine"], ["--resume", "auto"]):
        assert run(["train", str(SPEC), *SETS, "--data", "dataa", *where]) == 2
        assert "dataa" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    data = write_text(tmp_path / "data")
    (tmp_path / "runs" / "gpt_mini-007" / "generated").mkdir(parents=True)  # of a process that was killed
    make_run(tmp_path / "runs" / "gpt_mini-003", small_spec(), str(data))
    assert run(["train", str(SPEC), *SETS, "--resume", "auto", "--data", "dataa"]) == 2
    (tmp_path / "runs" / "gpt_mini-003" / "checkpoints" / "step_00000003").rename(tmp_path / "elsewhere")
    assert run(["train", str(SPEC), *SETS, "--resume", "auto", "--data", str(data)]) == 0
    assert (tmp_path / "runs" / "gpt_mini-003" / "log.jsonl").exists()
    assert not is_run(tmp_path / "runs" / "gpt_mini-007")


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    tmp_path: Path, gone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = make_run(tmp_path / "run", small_spec(), str(write_text(tmp_path / "data")))
    add_checkpoint(trained, 1, 2)
    trained.log.write_text('{"event": "start", "step": 0}\n{"event": "checkpoint", "step": 2}\n')
    for path in trained.checkpoints.iterdir():
        path.rename(tmp_path / path.name) if gone else (path / "model.safetensors").write_bytes(b"")
    assert run(["train", "--run", str(trained.directory), "--resume", "auto"]) == 5
    said = capsys.readouterr().err
    assert "every checkpoint of the run is damaged or missing" in said
    assert len(read_log(trained.log)) == 2  # not a step


def options(tmp_path: Path) -> TrainOptions:
    return TrainOptions(small_spec(), "cpu", str(write_text(tmp_path / "data")), tmp_path / "run")


def test_progress_that_nobody_reads_ends_no_run(tmp_path: Path) -> None:
    lines = []

    def closed(line: str) -> None:
        lines.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    assert train(options(tmp_path), closed).complete
    assert len(lines) > 4


def test_a_closed_pipe_ends_no_run(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    command = [sys.executable, "-m", "specc.cli", "train", str(SPEC), *SETS, "--data", str(data), "--run", "run"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.readline()
        process.stderr.close()
        process.wait(timeout=120)
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["event"] == "end"


def test_a_run_that_is_ended_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    def say(line: str) -> None:
        assert line.startswith("run: ")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(options(tmp_path), say)
    assert not (tmp_path / "run").exists()
