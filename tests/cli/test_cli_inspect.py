"""`specc inspect` as a user calls it: its output, and its exit codes."""

import json
import sys
from pathlib import Path

import pytest
from run_samples import make_run, small_spec, write_text

from specc.cli.app import run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    return make_run(folder / "run", small_spec(), str(write_text(folder / "data"))).directory


def test_tables_and_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(directory), "--only", "norms", "--only", "ranks", "--sequences", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ranks ") and "\nnorms " in text and "heads " not in text
    assert run(["inspect", str(directory), "--only", "heads", "--sequences", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["heads"]) == 8 and facts["ranks"] == [] and facts["rows"] == [2, 32]


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["--only", "ranks", "--bits", "4"], 2, "--bits applies only to the sensitivity"),
        (["--only", "ranks", "--kind", "a=b"], 2, "--kind applies only to experts"),
        (["--only", "experts", "--kind", "a"], 2, "--kind a: write NAME=DATA"),
        (["--only", "experts", "--kind", "a=b", "--kind", "a=c"], 2, "--kind a=c: write NAME=DATA"),
        (["--only", "rank"], 2, "rank"),
        (["--only", "heads", "--data", "/nowhere"], 2, "/nowhere"),
        (["--only", "heads", "--target", "sm90"], 2, "sm90"),
        (["--sequences", "1"], 2, "--sequences"),
    ],
)
def test_mistakes_end_in_a_line(
    directory: Path, options: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(directory), *options]) == code
    assert line in capsys.readouterr().err


def test_pictures_without_matplotlib(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("specc.runtime.inspection.pictures.find_spec", lambda name: None)
    assert run(["inspect", str(directory), "--picture", str(tmp_path / "p")]) == 3
    assert "pip install 'specc[bench]'" in capsys.readouterr().err and not (tmp_path / "p").exists()
