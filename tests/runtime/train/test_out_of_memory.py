"""The advice after a GPU ran out of memory fits by the forecast, and no smaller change does."""

import gc
import re
from pathlib import Path

import pytest
import torch
from run_samples import SPEC, small_spec, write_text

from specc.cli.train import place_of_training
from specc.compiler import pipeline
from specc.compiler.plan.lock import NO_LOCK
from specc.compiler.report.step import step_of
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.errors import RunFailure
from specc.runtime.train import train as module
from specc.runtime.train.out_of_memory import GENERAL, MARGIN, Advice, capacity_of, out_of_memory_named
from specc.runtime.train.train import TrainOptions, train

MLP35 = SPEC.with_name("gpt_mlp35.yaml")


def options_for(spec: Spec, folder: Path, target: str = "cpu") -> TrainOptions:
    return TrainOptions(spec, target, str(write_text(folder / "data")), folder / "run", cache=folder / "cache")


def forecast(spec: Spec, **settings: object) -> int:
    spec = spec.model_copy(update={"train": spec.train.model_copy(update=settings)})
    return step_of(spec, pipeline.plan(spec, "sm90", "")).memory.total


def test_the_largest_micro_batch_and_the_cheapest_part_that_fit_are_named() -> None:
    """A step of 384 rows, in micro-batches of 48."""
    spec = load(MLP35)[0]
    fits = MARGIN * forecast(spec, micro_batch=24)
    hint = Advice(spec, "sm90", NO_LOCK, place="specs/gpt_mlp35.yaml:67").hint(round(fits) + 1)
    assert hint.startswith("specs/gpt_mlp35.yaml:67: train.micro_batch: 24 instead of 48 (")
    assert "the size of a step need not change" in hint
    less = Advice(spec, "sm90", NO_LOCK).hint(round(fits) - 1)
    assert less.startswith("train.micro_batch: 16 instead of 48 (")
    mlp = forecast(spec, recompute=("mlp",))
    assert "or train.recompute: [" in Advice(spec, "sm90", NO_LOCK).hint(round(MARGIN * mlp) + 1)


def test_the_micro_batch_divides_the_step_of_every_process() -> None:
    spec = load(MLP35, ("train.micro_batch=12",))[0]
    hint = Advice(spec, "sm90", NO_LOCK, processes=8).hint(round(MARGIN * forecast(spec, micro_batch=11)) + 1)
    assert hint.startswith("train.micro_batch: 8 instead of 12 (")  # 384 rows of 8 processes: 48 each


def test_a_forecast_that_was_too_low_is_scaled() -> None:
    """The run did not fit in more memory than its forecast, so a change must save as much."""
    spec = load(MLP35)[0]
    whole = forecast(spec)
    (rows,) = re.findall(r"micro_batch: (\d+) instead", Advice(spec, "sm90", NO_LOCK).hint(2 * whole))
    assert int(rows) == 32 and MARGIN * forecast(spec, micro_batch=32) < whole


def test_a_model_that_is_too_large_says_so() -> None:
    hint = Advice(load(MLP35)[0], "sm90", NO_LOCK).hint(10**8)
    assert "no micro_batch and no recompute fits: the forecast is at least" in hint


def test_the_place_is_that_of_the_file_or_the_override(tmp_path: Path) -> None:
    line = next(i for i, text in enumerate(MLP35.read_text().splitlines(), 1) if "micro_batch" in text)
    assert place_of_training(MLP35, ()) == f"{MLP35}:{line}"
    assert place_of_training(MLP35, ("train.micro_batch=64",)).startswith("--set train.micro_batch:1")


def test_memory_that_is_full_before_the_first_step_ends_with_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(module, "_prepare", full)
    monkeypatch.setattr(module, "capacity_of", lambda device: 10**8)
    with pytest.raises(RunFailure, match="before the first step: out of GPU memory") as caught:
        train(options_for(small_spec(), tmp_path), lambda line: None)
    assert caught.value.exit_code == 4 and "train." in caught.value.hint


@pytest.mark.parametrize(("share", "wanted"), [(1.0, 5 << 30), (0.1, 2 << 30)])
def test_memory_is_what_is_free_of_the_share_of_this_process(
    share: float, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 20 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    assert capacity_of(torch.device("cuda")) == wanted


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="other"), out_of_memory_named("now", lambda: GENERAL):
        raise ValueError("other")


@pytest.mark.gpu
def test_a_run_that_does_not_fit_names_a_micro_batch_that_does(tmp_path: Path) -> None:
    """With a part of the GPU's memory, as the allocator limits it."""
    rows = ("targets=[sm90, cpu]", "train.micro_batch=512", "train.tokens_per_step=131072", "model.dim=512")
    spec = load(SPEC, (*rows, "train.steps=2", "train.schedule={warmdown_steps: 1}"))[0]
    wanted = forecast(spec, micro_batch=200)
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(wanted / total)
    try:
        with pytest.raises(RunFailure, match="out of GPU memory") as caught:
            train(options_for(spec, tmp_path / "large", "sm90"), lambda line: None)
        (fits,) = re.findall(r"micro_batch: (\d+) instead of 512", caught.value.hint)
        del caught  # the frames of its traceback have the tensors of the run
        gc.collect()
        fewer = spec.model_copy(update={"train": spec.train.model_copy(update={"micro_batch": int(fits)})})
        torch.cuda.empty_cache()
        train(options_for(fewer, tmp_path / "fits", "sm90"), lambda line: None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
