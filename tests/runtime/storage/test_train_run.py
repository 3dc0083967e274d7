"""The run directory, its lock and its log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from log_lines import read_log
from run_samples import gpt_mini

from specc.compiler.spec import check
from specc.compiler.text.shell import shell_path
from specc.runtime.errors import EnvironmentFailure, IntegrityError
from specc.runtime.log import RunLog, Step
from specc.runtime.storage.run_directory import (
    Run,
    RunDirectoryError,
    default_run,
    is_run,
    locked,
    newest_run,
    readable,
    require_free,
)

SPECS = Path(__file__).parents[3] / "specs"


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_run_is_read_back_as_it_was_made(tmp_path: Path, path: Path) -> None:
    overrides = ("train.seed=7", "eval.batch=3")
    created = Run(tmp_path / "a" / "b", check.load(path, overrides)[0], "sm90", "data/text", overrides).create()
    opened = Run.open(created.directory)
    assert opened == created and opened.spec.train.seed == 7 and opened.overrides == overrides
    assert opened.spec_digest == created.spec_digest
    assert sorted(entry.name for entry in created.directory.iterdir()) == [
        "checkpoints", "generated", "quantized", "run.json", "spec.json",
    ]  # fmt: skip


def test_equal_specs_have_equal_digests_and_others_not(tmp_path: Path) -> None:
    def digest(*overrides: str) -> str:
        return Run(tmp_path, gpt_mini(*overrides), "cpu", "x").spec_digest

    assert digest() == digest("train.steps=120") == digest("train.seed=1337") != digest("train.seed=1338")
    assert readable(gpt_mini()) == readable(gpt_mini()) and readable(gpt_mini()).endswith("}\n")
    assert json.loads(readable(gpt_mini()))["train"]["optimizers"][1]["eps"] == 1e-8  # defaults are resolved


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for directory, problem in ((tmp_path, "is not empty, and is not a run"), (tmp_path / "thesis.tex", "is not a dir")):
        with pytest.raises(RunDirectoryError, match=problem) as caught:
            Run(directory, gpt_mini(), "cpu", "x").create()
        assert (caught.value.exit_code, caught.value.hint) == (2, "name another directory")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    run = Run(tmp_path / "run", gpt_mini(), "cpu", "x").create()
    with pytest.raises(RunDirectoryError, match="is not empty") as caught:
        Run(run.directory, gpt_mini(), "cpu", "x").create()
    assert "--resume auto" in caught.value.hint


def test_what_a_killed_start_left_is_used(tmp_path: Path) -> None:
    run = Run(tmp_path, gpt_mini(), "cpu", "x").create()
    (tmp_path / "spec.json").unlink()
    assert not is_run(tmp_path)
    require_free(tmp_path)
    assert Run(tmp_path, gpt_mini(), "cpu", "x").create() == run


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such run"):
        Run.open(tmp_path / "none")
    with pytest.raises(RunDirectoryError, match=r"has no spec\.json"):
        Run.open(tmp_path)


@pytest.mark.parametrize("name", ["spec.json", "run.json"])
@pytest.mark.parametrize("text", ["", "{}", "[1", '{"format": 1, "target": 3}', "\x00"])
def test_a_damaged_run_is_an_integrity_error(tmp_path: Path, name: str, text: str) -> None:
    Run(tmp_path, gpt_mini(), "cpu", "x").create()
    (tmp_path / name).write_text(text)
    with pytest.raises(IntegrityError, match=name) as caught:
        Run.open(tmp_path)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1", "the text is not JSON"),
        ("{}", "format is missing"),
        ('{"format": 2, "target": "cpu", "data": "x", "overrides": []}', "format must be 1"),
        ('{"format": 1, "target": 3, "data": "x", "overrides": []}', "target must be text"),
        ('{"format": 1, "target": "cpu", "data": "x", "overrides": [], "date": 1}', "date is not a valid key"),
    ],
)
def test_the_problem_of_a_damaged_run_is_named(tmp_path: Path, text: str, problem: str) -> None:
    Run(tmp_path, gpt_mini(), "cpu", "x").create()
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(IntegrityError) as caught:
        Run.open(tmp_path)
    assert caught.value.message == f"{tmp_path}: its run.json is damaged: {problem}"
    assert caught.value.hint


def test_the_problem_of_a_damaged_spec_is_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, gpt_mini(), "cpu", "x").create()
    spec = tmp_path / "spec.json"
    spec.write_text(spec.read_text().replace('"spec_version"', '"version"'))
    with pytest.raises(IntegrityError) as caught:
        Run.open(run.directory)
    assert caught.value.message.startswith(f"{tmp_path}: its spec.json or lock.json is damaged: ")
    assert "\n" not in caught.value.message and "spec.json:" not in caught.value.message


def test_another_spec_is_told_apart(tmp_path: Path) -> None:
    run = Run(tmp_path, gpt_mini(), "cpu", "x").create()
    run.require_same(gpt_mini(), "cpu")
    with pytest.raises(RunDirectoryError) as caught:
        run.require_same(gpt_mini("train.steps=500", "train.optimizers.0.lr=0.1", "fuse=[]"), "sm90")
    for part in (
        "train.steps: 120 in the run, 500 now",
        "train.optimizers.0.lr: 0.02 in the run, 0.1 now",
        "fuse: ",
        "the target: cpu in the run, sm90 now",
    ):
        assert part in caught.value.message


def test_names_of_runs_count_up(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert default_run("gpt", root) == root / "gpt-001" and newest_run("gpt", root) is None
    for name in ("gpt-001", "gpt-007", "gpt-mini-030", "gpt-12", "other-090", "gpt-1000"):
        (root / name).mkdir(parents=True)
    assert default_run("gpt", root) == root / "gpt-1001" and newest_run("gpt", root) is None
    for name in ("gpt-001", "gpt-007", "gpt-mini-030"):
        (root / name / "spec.json").touch()
    assert newest_run("gpt", root) == root / "gpt-007"  # training never began in those after it
    assert default_run("gpt-mini", root) == root / "gpt-mini-031"
    assert default_run("new", root) == root / "new-001"


HOLDER = """
import sys
from pathlib import Path
from specc.runtime.storage.run_directory import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_cannot_write_in_one_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match="in use by another process"), locked(tmp_path / "run"):
            raise AssertionError("both have it")
        holder.kill()
    with locked(tmp_path / "run"):  # a killed process does not keep it
        require_free(tmp_path / "run")


def test_the_log_has_a_record_a_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.write("start", step=0, target="cpu")
    log.step(Step(1, 2.5, 1.0, 0.5, 1000.0, 0.25))
    assert read_log(tmp_path / "log.jsonl") == [  # flushed, though open
        {"event": "start", "step": 0, "target": "cpu"},
        {
            "event": "step",
            "step": 1,
            "loss": 2.5,
            "lr": 1.0,
            "grad_norm": 0.5,
            "tokens_per_second": 1000.0,
            "seconds": 0.25,
        },
    ]
    with pytest.raises(ValueError, match="JSON"):
        log.write("step", loss=float("nan"))
    log.close()


def test_a_full_disk_raises_environment_failure_from_the_log() -> None:
    log = RunLog(Path("/dev/full"))
    with pytest.raises(EnvironmentFailure, match="cannot write /dev/full: No space left"):
        log.write("step", step=1)
    log.close()


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.write("start", step=0)
    for step in (1, 2, 3):
        log.write("step", step=step, loss=float(step))
    log.close()
    with path.open("a") as file:
        file.write('{"event": "step", "step": 4, "lo')  # killed
    log = RunLog(path)
    log.write("start", step=2)
    log.write("step", step=3, loss=3.5)
    log.close()
    events = [(record["event"], record["step"], record.get("loss")) for record in read_log(path)]
    assert events == [
        ("start", 0, None), ("step", 1, 1.0), ("step", 2, 2.0), ("start", 2, None), ("step", 3, 3.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "word"),
    [("runs/a", "runs/a"), ("-odd", "./-odd"), ("-o d", "'./-o d'"), ("./-odd", "./-odd"), ("a/-b", "a/-b")],
)
def test_a_path_is_no_option_of_a_proposed_command(path: str, word: str) -> None:
    assert shell_path(Path(path)) == word
    assert Run(Path(path), gpt_mini(), "cpu", "x").resume_command == f"specc train --run {word} --resume auto"
