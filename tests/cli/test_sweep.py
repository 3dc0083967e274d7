"""`specc sweep` and `specc compare` as a user calls them, with real runs: interrupted, continued, compared."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command_server import shell_environment
from log_lines import read_log
from run_samples import SMALL, SPEC, write_text

from specc.cli.app import run
from specc.runtime.compare.calibration import calibration_of
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.open_model import open_model
from specc.runtime.storage.run_directory import Run

STEPS = 120
SWEEP = f"""\
spec: {SPEC}
target: cpu
set:
{"".join(f"  - '{text}'{chr(10)}" for text in SMALL)}\
  - train.steps={STEPS}
  - train.checkpoint_every=20
  - train.validate_every=60
seeds: [1, 2]
settings:
  - name: base
  - name: gelu
    set: ['model.blocks.layers.1.act=gelu(x)']
  - name: too fast
    set: [train.optimizers.0.lr=1e30, train.optimizers.1.lr=1e30, train.clip_norm=null]
    seeds: [1]
quantize:
  - name: to nearest
    set: ['quant.default={{scheme: round, bits: 5}}']
"""


def steps_in(folder: Path) -> int:
    logs = folder.glob("*-seed*/log.jsonl")
    return sum(line.startswith('{"event": "step"') for log in logs for line in log.read_text().splitlines())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """A sweep that SIGTERM interrupted in its first runs and the same command continued: its file, its folder, and the
    end of the second command."""
    folder = tmp_path_factory.mktemp("sweep")
    file, data, out = folder / "acts.yaml", write_text(folder / "data"), folder / "out"
    file.write_text(SWEEP)
    command = ["specc", "sweep", str(file), "--data", str(data), "--out", str(out), "--jobs", "2"]
    command += ["--picture", str(folder / "acts.png"), "--json"]
    first = subprocess.Popen(command, env=shell_environment(), stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while steps_in(out) < 50 and time.monotonic() < until and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    notes = first.communicate(timeout=120)[1]
    assert first.returncode == 75, notes
    assert 50 <= steps_in(out) < 5 * STEPS and "the same command continues" in notes
    return file, out, subprocess.run(command, env=shell_environment(), capture_output=True, text=True)


def test_a_sweep_goes_on_and_reports_the_run_that_failed(swept: tuple[Path, Path, Any]) -> None:
    file, out, end = swept
    assert end.returncode == 4, end.stderr
    facts = json.loads(end.stdout)
    assert json.loads((out / "results.json").read_text()) == facts
    base, gelu, fast = facts["settings"]
    for row in (base, gelu):
        assert row["seeds"] == [1, 2] and row["unfinished"] == {} and row["seconds"] > 0
        values = row["metric"]["values"]
        assert row["metric"]["mean"] == pytest.approx(sum(values) / 2)
        assert row["metric"]["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert gelu["difference"] == pytest.approx(gelu["metric"]["mean"] - base["metric"]["mean"])
    assert fast["metric"] is None and "gradient norm nan" in fast["unfinished"]["too_fast-seed1"]
    (quantized,) = facts["quantized"]
    assert quantized["seeds"] == [1, 2]
    sizes = [(out / f"quantized_to_nearest-seed{seed}/quantized/model.specc") for seed in (1, 2)]
    assert quantized["bytes"] == max(path.stat().st_size for path in sizes if path.exists())
    assert (file.parent / "acts.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_is_the_one_that_it_would_have_been(swept: tuple[Path, Path, Any]) -> None:
    """Bit for bit, and an ordinary run: `specc train` with the recorded overrides gives the same."""
    _, out, _ = swept
    interrupted = out / "base-seed1"
    known = Run.open(interrupted)
    assert (interrupted / "log.jsonl").read_text().count('"event": "start"') == 2
    alone = out.parent / "alone"
    overrides = [word for text in known.overrides for word in ("--set", text)]
    command = ["specc", "train", str(SPEC), "--target", "cpu", "--data", known.data, "--run", str(alone), *overrides]
    subprocess.run(command, env=shell_environment(), check=True, capture_output=True)
    assert Run.open(alone).spec_digest == known.spec_digest

    def numbers(run: Path) -> list[tuple[Any, ...]]:
        records = read_log(run / "log.jsonl")
        return [(r["event"], r["step"], r.get("loss"), r.get("nats")) for r in records if "loss" in r or "nats" in r]

    assert len(numbers(alone)) == STEPS + 3
    assert numbers(interrupted) == numbers(alone)


def test_finished_runs_are_not_repeated(
    swept: tuple[Path, Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, _ = swept
    before = (out / "base-seed1/log.jsonl").read_bytes()
    options = ["--data", str(out.parent / "data"), "--out", str(out)]
    assert run(["sweep", str(file), *options, "--max-seconds", "0"]) == 0
    captured = capsys.readouterr()
    assert "4 of 5 runs are finished" in captured.err and "1 runs are not started" in captured.err
    assert (out / "base-seed1/log.jsonl").read_bytes() == before
    lines = captured.out.splitlines()
    assert lines[0].split("|")[1:5] == [" setting                    ", " seeds ", " bits per byte ", "    std "]
    assert [line.split("|")[1].strip() for line in lines[2:7]] == [
        "base",
        "base, weights not averaged",
        "gelu",
        "too fast",
        "quantized: to nearest (*)",
    ]
    assert any(line.startswith("not finished: too_fast-seed1: step ") for line in lines)


def test_a_changed_file_is_refused(
    swept: tuple[Path, Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, _ = swept
    options = ["--data", str(out.parent / "data"), "--out", str(out), "--max-seconds", "0"]

    def message(text: str, *more: str) -> str:
        (tmp_path / "acts.yaml").write_text(text)
        code = run(["sweep", str(tmp_path / "acts.yaml"), *options, *more])
        captured = capsys.readouterr()
        return f"{code} {captured.err}"

    text = file.read_text()
    changed = message(text.replace(f"train.steps={STEPS}", "train.steps=50"))
    assert changed.startswith("2 error: U016 the sweep file has changed since ")
    assert f"`train.steps=50` instead of `train.steps={STEPS}` in base-seed1, base-seed2 and 3 more" in changed
    assert "no entry has the settings and seed in base-seed2" in message(text.replace("seeds: [1, 2]", "seeds: [1]"))
    more = text.replace("seeds: [1, 2]", "seeds: [1, 2, 3]")
    assert "was started without base-seed3, gelu-seed3, quantized_to_nearest-seed3" in message(more)
    spec = tmp_path / "gpt_mini.yaml"
    spec.write_text(SPEC.read_text().replace("clip_norm: 1.0", "clip_norm: 0.9"))
    assert spec.read_text() != SPEC.read_text()
    assert "the same overrides give another spec" in message(text.replace(str(SPEC), str(spec)))
    other = ["--data", str(tmp_path)]
    assert f"data is {tmp_path}, but was " in message(text, *other)
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    assert message(more, "--extend", "--out", str(copy)).startswith("0 ")
    assert len(json.loads((copy / "sweep.json").read_text())["runs"]) == 7
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "is neither empty nor the folder of a sweep" in message(text, "--out", str(tmp_path / "full"))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "acts.yaml").write_text(SWEEP)
    assert run(["sweep", str(tmp_path / "acts.yaml"), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "base-seed1: base" and lines[-1] == "5 runs of 3 settings, all specs are valid"
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").touch()
    assert run(["sweep", str(tmp_path / "acts.yaml"), "--dry-run", "--out", str(tmp_path / "out")]) == 2
    assert "is neither empty nor the folder of a sweep" in capsys.readouterr().err


def test_a_sweep_can_be_compared(swept: tuple[Path, Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings are groups, with calibration and texts."""
    _, out, end = swept
    arguments = [str(out), "--calibration", "--max-tokens", "200", "--prompt", "the ", "--length", "5", "--json"]
    capsys.readouterr()
    assert run(["compare", *arguments]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in facts["groups"]] == ["base", "gelu"]
    rows = json.loads(end.stdout)["settings"]
    assert [group["summary"]["mean"] for group in facts["groups"]] == pytest.approx(
        [row["metric"]["mean"] for row in rows[:2]]
    )
    assert facts["pairs"][0]["test"]["p"] <= 1 and "gelu(x)" in str(facts["pairs"][0]["spec"])
    assert any("too_fast-seed1 is left out" in note for note in facts["notes"])
    assert [len(results) for results in facts["calibration"].values()] == [2, 2]
    assert set(facts["texts"]) == {"base", "gelu"}


def test_calibration_is_of_the_probabilities_that_eval_scores(swept: tuple[Path, Path, Any]) -> None:
    """Cached decoding and the fused loss are two ways to one loss."""
    _, out, _ = swept
    opened = open_model(out / "base-seed1", "cpu")
    result = calibration_of(opened, 300)
    scored = evaluate(out / "base-seed1", EvaluateOptions(max_tokens=300), target="cpu")
    assert result.tokens == 300 == sum(entry.count for entry in result.bins)
    assert result.nats == pytest.approx(scored.nats / scored.tokens, rel=1e-5)  # type: ignore[union-attr]
    assert 0 < result.ece < 1 and 0 < result.accuracy < 1
