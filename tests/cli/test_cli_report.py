"""`specc report` as a user calls it: what it writes, and its exit codes."""

from pathlib import Path

import pytest
from run_samples import make_run, small_spec, write_text

from specc.cli.app import run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    return make_run(folder / "run", small_spec(), str(write_text(folder / "data"))).directory


def test_it_writes_the_page_and_the_card(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(directory), "--prompt", "of ", "--max-tokens", "3", "--temperature", "0"]) == 0
    page = directory / "report.html"
    assert capsys.readouterr().out == f"wrote {page}: {page.stat().st_size:,} bytes\n"
    assert "<b>of </b>" in page.read_text() and (directory / "samples.json").is_file()
    assert run(["report", str(directory), "--card", "--out", str(tmp_path / "card.md")]) == 0
    assert (tmp_path / "card.md").read_text().startswith("---\nlibrary_name: specc\n")


def test_only_its_own_page_is_replaced_without_force(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    for options in (["--no-samples"], ["--card"]):
        spec.write_text("name: kept\n")
        assert [run(["report", str(directory), *options]) for _ in range(2)] == [0, 0]
        page = directory / ("README.md" if "--card" in options else "report.html")
        spelled = directory / ".." / directory.name / page.name
        assert [run(["report", str(directory), *options, "--out", str(path)]) for path in (page, spelled)] == [0, 0]
        assert run(["report", str(directory), *options, "--out", str(spec)]) == 2
        assert f"U012 {spec} exists" in capsys.readouterr().err and spec.read_text() == "name: kept\n"
        assert run(["report", str(directory), *options, "--out", str(spec), "--force"]) == 0
        assert spec.read_text() == page.read_text()


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["--card", "--prompt", "a"], 2, "--prompt has no effect together with --card"),
        (["--no-samples", "--max-tokens", "3"], 2, "--max-tokens has no effect together with --no-samples"),
        (["--no-samples", "--out", "/nowhere/page.html"], 3, "cannot write /nowhere/page.html"),
        (["--no-samples", "--out", "/"], 3, "cannot write /"),
        (["--temperature", "-1"], 2, "temperature"),
    ],
)
def test_mistakes_end_in_a_line(
    directory: Path, options: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(directory), *options]) == code
    assert line in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
