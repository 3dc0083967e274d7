"""The table and the picture of a sweep, from runs with a log and no weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from logged_runs import logged_run
from run_samples import SMALL, SPEC

from specc.cli.app import run
from specc.runtime.storage import committed
from specc.runtime.sweep.folder import SweepFolder
from specc.runtime.sweep.picture import sweep_picture
from specc.runtime.sweep.plan import PlannedSweep, read_sweep
from specc.runtime.sweep.results import results_of


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlannedSweep:
    """A sweep in the working directory: two seeds of two values, all finished."""
    monkeypatch.chdir(tmp_path)
    return begun(tmp_path, "seeds: [1, 2]\ngrid: {model.dim: [32, 64]}\n")


def begun(folder: Path, text: str) -> PlannedSweep:
    """The folder `out` of a sweep whose runs have the losses 3.0, 3.1, ... in the order of the sweep."""
    file = folder / "sweep.yaml"
    file.write_text(f"spec: {SPEC}\ntarget: cpu\nset: {json.dumps(SMALL)}\n{text}")
    sweep = read_sweep(file)
    assert run(["sweep", str(file), "--out", "out", "--max-seconds", "0"]) == 0
    for number, planned in enumerate(sweep.runs):
        logged_run(folder / "out" / planned.name, 3.0 + 0.1 * number, planned.overrides)
    return sweep


def table(capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert run(["sweep", "sweep.yaml", "--out", "out", "--table"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_whose_final_validation_is_damaged_is_named(
    swept: PlannedSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only this run is left out of its setting."""
    name = swept.runs[0].name
    log = Path("out", name, "log.jsonl")
    *before, averaged, end = log.read_text().splitlines()
    log.write_text("\n".join([*before, averaged[:60], end]))
    lines = table(capsys)
    assert [cell.strip() for cell in lines[2].split("|")[1:5]] == ["dim=32", "1", "3.1000", "-"]
    assert f"not finished: {name}: the final validation is missing or damaged" in lines


def test_a_value_with_a_comma_is_one_line_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures: list[Any] = []
    monkeypatch.setattr("specc.runtime.sweep.picture.png", lambda figure: figures.append(figure) or b"")
    acts = ["leaky_relu(x, 0.5)", "gelu(x)"]
    grid = {"model.dim": [32, 64], "model.blocks.layers.1.act": acts}
    sweep = begun(tmp_path, f"grid: {json.dumps(grid)}\nsettings: [{{name: 'a, b'}}]\n")
    sweep_picture(results_of(SweepFolder.existing(Path("out"), sweep), {}), "title")
    handles, labels = figures[0].axes[0].get_legend_handles_labels()
    assert labels == [f"a, b, act={act}" for act in acts]
    assert [list(handle.lines[0].get_xdata()) for handle in handles] == [[32, 64], [32, 64]]


def quantized(run: Path, nats: float, size: int, *, tokens: int = 1000) -> Path:
    """The report of a quantized run; returns its path."""
    before, after = ({"nats": (nats + more) * tokens, "tokens": tokens, "bpb": nats + more} for more in (0.0, 0.25))
    report = json.dumps({"artifact_bytes": size, "before": before, "after": after})
    committed.write(run / "quantized", [("report.json", [report.encode()])])
    return run / "quantized/report.json"


def test_a_run_whose_quantization_is_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = begun(tmp_path, "seeds: [1, 2]\nquantize: [{name: int8}]\n")
    reports = [quantized(Path("out", work.name), 3.0, 999 - number) for number, work in enumerate(sweep.work)]
    whole = table(capsys)
    assert [line.split("|")[-2].strip() for line in whole[2:5]] == ["999", "", "997"]
    assert "(*) difference from the same runs before quantization" in whole
    for text in (reports[0].read_text().replace("99", "77"), "{"):
        for number in (0, 2):
            reports[number].write_text(text)
        lines = table(capsys)
        assert [line.split("|")[-2].strip() for line in lines[2:5]] == ["998", "", "996"]
        assert [line.split()[2] for line in lines if "report.json: " in line] == [
            f"{sweep.work[number].name}:" for number in (0, 2)
        ]


def test_the_table_states_on_how_many_tokens_quantized_weights_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation of training may score a part of the split."""
    monkeypatch.chdir(tmp_path)
    sweep = begun(tmp_path, "quantize: [{name: int8}]\n")
    quantized(Path("out", sweep.quantizations[0].name), 2.5, 999, tokens=12345)
    note = "(*) scored on 12,345 tokens, the rows without * on 1,000; difference from the same runs before quantization"
    assert note in table(capsys)
