"""`train --dry-run`: without a GPU and without a run, for any target."""

from pathlib import Path

import pytest
from run_samples import SMALL, SPEC, small_spec, write_text

from specc.cli.app import run as specc
from specc.compiler import pipeline
from specc.compiler.report.step import step_of
from specc.compiler.spec.check import load
from specc.runtime.bench import dry_run as module
from specc.runtime.bench.dry_run import dry_run


def test_a_step_runs_for_a_gpu_target_and_its_memory_has_parts(tmp_path: Path) -> None:
    spec = small_spec("targets=[cpu, sm90]")
    result = dry_run(spec, "sm90", str(write_text(tmp_path / "data")), (), tmp_path / "cache", lambda line: None)
    memory = step_of(spec, pipeline.plan(spec, "sm90", "")).memory
    assert result.full and not result.measured and result.bytes == memory.total and result.parts == memory.parts
    assert 4.5 < result.loss < 7  # near ln(257) for random bytes
    assert "forecast:" in "\n".join(result.lines())


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt_mini", ("model.context=128", "model.blocks.count=2")),
        ("gpt_mini", ("model.context=128", "model.blocks.count=2", "fuse=[]")),
        ("gpt_mlp35", ("model.vocab=1024", "model.dim=128", "model.context=128", "train.micro_batch=16")),
        ("gpt_moe", ("model.vocab=257", "model.dim=192", "model.context=128", "model.blocks.count=2")),
        ("poly_transformer", ("train.batch=64",)),
    ],
)
def test_the_estimate_is_within_15_percent_of_the_bytes_of_tensors(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    spec = load(SPEC.with_name(f"{name}.yaml"), ("targets=[cpu]", *overrides))[0]
    size = {} if spec.train.batch is not None else {"tokens_per_step": spec.train.at_once() * spec.model.window}
    spec = spec.model_copy(update={"train": spec.train.model_copy(update=size)})
    result = dry_run(spec, "cpu", None, (), tmp_path, lambda line: None)
    assert result.full and result.estimate == pytest.approx(result.peak, rel=0.15)


def test_a_large_step_runs_with_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 1)
    result = dry_run(small_spec(), "cpu", None, (), tmp_path, lambda line: None)
    assert not result.full and result.data == "" and "one row of" in result.size


def test_the_command_leaves_no_run_and_refuses_data_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sets = [word for text in SMALL for word in ("--set", text)]
    words = ["train", str(SPEC), "--dry-run", *sets]
    assert specc([*words, "--data", str(write_text(tmp_path / "data"))]) == 0
    shown = capsys.readouterr().out
    assert "parameters " in shown and "masters " in shown and "ran on the CPU, in full size: loss " in shown
    assert specc([*words, "--data", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "runs").exists()
