"""Exit codes of commands, and of errors of each kind."""

import errno
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_shell import ROOT, Broken, Shell

from specc.compiler import build
from specc.compiler.errors import EnvironmentProblem, SpeccError

TABLE = [
    (["--help"], 0),
    (["--version"], 0),
    (["build", "--help"], 0),
    ([], 2),
    (["nope"], 2),
    (["--nope"], 2),
    (["build", "nope.yaml"], 2),
    (["build", "specs/tiny.yaml", "--nope"], 2),
    (["plan"], 2),
    (["plan", "specs"], 2),
    (["plan", "specs/tiny.yaml", "--set", "train.steps=none"], 2),
    (["plan", "specs/tiny.yaml", "--set", "nonsense"], 2),
    (["plan", "specs/tiny.yaml", "--set", "train.steps=5"], 0),
    (["validate"], 2),
    (["validate", "specs/tiny.yaml"], 0),
    (["validate", "specs/tiny.yaml", "nope.yaml"], 2),
    (["explain", "specs/tiny.yaml"], 0),
    (["explain", "specs/tiny.yaml", "nope"], 2),
    (["explain", "specs/tiny.yaml", "--target", "sm90"], 2),
    (["ir", "specs/tiny.yaml", "--after", "nope"], 2),
    (["ir", "specs/tiny.yaml", "--program", "nope"], 2),
    (["ir", "specs/tiny.yaml", "--target", "sm90"], 2),
    (["diff", "specs/tiny.yaml", "specs/tiny.yaml"], 0),
    (["diff", "specs/tiny.yaml", "nope.yaml"], 2),
    (["init", "other"], 2),
    (["init", "Other", "--from", "tiny"], 2),
    (["init", "tiny", "--from", "tiny"], 2),
    (["schema", "--check"], 1),
    (["schema"], 0),
    (["schema", "findings"], 0),
    (["schema", "findings", "--check"], 2),
    (["schema", "nonsense"], 2),
    (["build", "--check"], 1),
    (["build", "--diff"], 1),
    (["build", "-"], 2),
    (["plan", "specs/tiny.yaml", "--diff"], 0),
    (["plan", "specs/tiny.yaml", "--format", "yaml"], 2),
    (["explain"], 0),
    (["explain", "S104"], 0),
    (["explain", "S999"], 2),
    (["explain", "S104", "node"], 2),
    (["render", "specs/tiny.yaml"], 0),
    (["render", "specs/tiny.yaml", "--set", "model.dimm=1"], 2),
    (["breaking", "specs/tiny.yaml", "--against", "specs/tiny.yaml"], 0),
    (["breaking", "specs/tiny.yaml"], 2),
    (["breaking", "--against", "no-such-branch"], 2),
    (["migrate", "specs/tiny.yaml", "--check"], 0),
    (["migrate", "nope.yaml"], 2),
    (["explain", "E0104"], 2),
    (["build", "specs/tiny.yaml", "--check", "--force"], 2),
    (["completion", "bash"], 0),
    (["completion", "tcsh"], 2),
    (["data"], 2),
    (["data", "nope"], 2),
    (["data", "check", "nope"], 2),
    (["train", "specs/tiny.yaml", "--steps", "-1"], 2),
    (["train", "nope.yaml"], 2),
    (["quantize", "nope"], 2),
    (["export", "nope"], 2),
    (["size", "nope"], 2),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code"), TABLE, ids=[" ".join(arguments) or "nothing" for arguments, _ in TABLE])
def test_exit_codes(here: Path, specc: Shell, arguments: list[str], code: int) -> None:
    assert specc(*arguments) == code
    assert "Traceback" not in specc.err
    assert (specc.err or specc.out) != ""
    assert sorted(path.name for path in here.iterdir()) == ["specs"]


def test_an_unknown_command_is_named(specc: Shell) -> None:
    assert specc("nope") == 2
    assert "No such command 'nope'" in specc.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpeccError("m", "h"), 2),
        (EnvironmentProblem("m", "h"), 3),
        (KeyboardInterrupt(), 130),
        (Broken("boom"), 70),
        (AssertionError("boom"), 70),
        (EOFError("boom"), 70),
    ],
)
def test_each_error_has_its_exit_code(
    here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def failing(*args: object, **words: object) -> None:
        raise error

    monkeypatch.setattr("specc.compiler.build.compile_spec", failing)
    assert specc("plan", "specs/tiny.yaml") == code
    assert ("Traceback" in specc.err) == (code == 70)
    if code == 70:
        assert "boom" in specc.err
        assert "this is a bug in specc" in specc.err
    elif code == 130:
        assert specc.err.strip() == "interrupted"
    else:
        assert specc.err == f"error: {error.code} m\n  = help: h\n"


def test_a_disk_that_refuses_is_no_bug(here: Path, specc: Shell) -> None:
    shutil.rmtree("specs")
    Path("specs").write_text("a file\n")
    assert specc("init", "other", "--from", str(ROOT / "specs/gpt_mini.yaml")) == 3
    assert specc.err == "error: E003 specs: File exists\n"


@pytest.mark.parametrize(
    ("arguments", "code"), [("ir specs/tiny.yaml", 0), ("build --check", 1), ("build --check --format json", 1)]
)
def test_a_reader_that_leaves_changes_no_exit_code(here: Path, arguments: str, code: int) -> None:
    text = "from specc.cli.app import main; main()"
    command = f"{{ {sys.executable} -c '{text}' {arguments}; echo $? > code; }} | exec true"
    done = subprocess.run(["bash", "-c", command], cwd=here, capture_output=True, text=True)
    assert (Path("code").read_text(), done.stderr) == (f"{code}\n", "")


def test_a_path_can_be_read_in_a_locale_of_ascii(here: Path) -> None:
    Path("specs/tiny.yaml").rename("specs/ä.yaml")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", "from specc.cli.app import main; main()", "validate", "specs/ä.yaml", "ö.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "specs/ä.yaml: ok\n")
    assert done.stderr.startswith(r"\xc3\xb6.yaml:1:1: S001")


def test_a_full_disk_is_one_of_the_environment(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("specc.compiler.generated_folder.os.fsync", full)
        assert specc("build") == 3
    assert "No space left on device" in specc.err and "= help: free some space, and build again" in specc.err
    left = {path.name for path in Path("generated/tiny").rglob("*") if path.is_file()}
    assert left == set(), "nothing half-written"
    assert specc("build", "--check") == 1 and specc("build") == 0


def test_without_an_installation_there_is_one_clear_line(
    here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    build._version.cache_clear()  # a command has not looked it up before
    for arguments in (["--version"], ["build"]):
        assert specc(*arguments) == 3
        assert specc.err.startswith("error: E002 specc is not installed") and "pip install -e ." in specc.err
        assert "Traceback" not in specc.err
