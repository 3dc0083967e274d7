"""Messages of a submission that ends early, exceeds its budget, or was not written completely."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from run_samples import make_run, small_spec
from submissions import Submission, alone

from specc.cli.app import run as specc
from specc.runtime.artifact.codecs import Codec
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.submission.count import submission_size
from specc.runtime.submission.export import export_submission
from specc.runtime.submission.names import CODE, WEIGHTS


def test_a_training_that_ends_before_the_last_phase_is_refused(submission: Submission, tmp_path: Path) -> None:
    """Its weights would be scored as the model of the last phase, which was not trained; with that phase it is fine."""
    spec = small_spec("model.blocks.order={at: [[0, 0..1], [0.5, 0..1 1]]}")
    run = make_run(tmp_path / "run", spec, str(submission.shards))
    quantize(run.directory, QuantizeOptions(max_tokens=50), lambda _: None)
    export_submission(run.directory, tmp_path / "out", codec=Codec.LZMA)
    (tmp_path / "out" / WEIGHTS).unlink()
    for steps, code in (("2", 4), ("3", 0)):  # the third of three is the first behind half of the run
        done = alone(submission, tmp_path / "out", "--data", str(submission.shards), "--steps", steps)
        assert done.returncode == code, done.stderr
        assert (f"--steps {steps} ends before the last phase" in done.stderr) == (code == 4)
        assert ("step 1: loss" in done.stdout) == (code == 0)  # not after training
        assert (tmp_path / "out" / WEIGHTS).is_file() == (code == 0)


def test_an_export_over_its_budget_ends_with_exit_code_1(
    submission: Submission, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are there, and it says so, and what would fit: as it was quantized, but with room for the code."""
    run = Path(shutil.copytree(submission.run.directory, tmp_path / "a run"))
    export = ["export", str(run), "--format", "submission", "--codec", "lzma", "--out"]
    assert specc([*export, str(tmp_path / "fits")]) == 0 and "over" not in capsys.readouterr().err
    quantize(run, QuantizeOptions(max_tokens=50, overrides=("quant.budget_bytes=40000",)), lambda _: None)
    assert specc([*export, str(tmp_path / "over")]) == 1
    shown = capsys.readouterr()
    assert "are over the budget of 40,000; both files are written" in shown.err
    assert f"specc quantize '{run}' --set quant.budget_bytes=40000 --for submission, then" in shown.err
    assert shown.out.count("wrote ") == 2 and submission_size(tmp_path / "over").over


def test_an_export_to_a_full_disk_leaves_nothing(
    submission: Submission, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the folders that it made nor the weights without their code; what was there before stays."""
    export = ["export", str(submission.run.directory), "--format", "submission", "--codec", "lzma", "--out"]
    write, there = os.write, tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    code = submission.folder.joinpath(CODE).read_bytes()
    monkeypatch.setattr("specc.runtime.submission.export.train_gpt", lambda *_: code)  # takes seconds each time
    for out in (tmp_path / "a/b", there):
        for allowed in (0, submission.folder.joinpath(WEIGHTS).stat().st_size + 99):
            left = [allowed]

            def full(descriptor: int, data: memoryview, left: list[int] = left) -> int:
                left[0] -= len(data)
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(descriptor, data)

            with monkeypatch.context() as patch:
                patch.setattr("specc.runtime.storage.atomic.os.write", full)
                assert specc([*export, str(out)]) == 3
            assert "No space left on device" in (said := capsys.readouterr().err) and "free some space" in said
            assert sorted(tmp_path.rglob("*")) == [there, there / "notes.txt"]


def test_what_a_killed_export_leaves_is_no_submission(
    submission: Submission, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder, or one with the weights alone, as the code is written last."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    shutil.copy(submission.folder / WEIGHTS, tmp_path / "cut")
    for name in ("cut", "empty"):
        for more in ([], ["--plain"]):
            assert specc(["size", str(tmp_path / name), *more]) == 5
            errors = capsys.readouterr().err
            assert (
                f"{name} is not a complete submission: it has no {CODE}" in errors
                and "export the submission again: specc export RUN" in errors
            )
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("")
    assert specc(["size", str(tmp_path / "other")]) == 2 and "is not a run" in capsys.readouterr().err
