"""Runs that train rounded for int8: where they begin, resuming, several processes, what is quantized of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import ADDITIVE, BY_FEATURE, LSTM, data_of
from round_runs import go, losses, small
from torch import Tensor

from specc.cli.app import run as command
from specc.compiler import pipeline
from specc.compiler.build import canonical
from specc.compiler.int8.products import integer_products
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.programs.programs import LoweringError
from specc.compiler.quant.scheme import Seen
from specc.compiler.spec.check import load
from specc.runtime.calibration.input_ranges import trained_scales
from specc.runtime.decode.lines import decoder_inputs
from specc.runtime.model.load import choose_target
from specc.runtime.open_model import open_model, read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint
from specc.runtime.train.loop import TrainResult
from specc.runtime.train.train import TrainOptions, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return go(tmp_path_factory.mktemp("rounds") / "run")


def test_until_it_begins_a_run_is_the_one_without(run: TrainResult, tmp_path: Path) -> None:
    """The multiplier is 0.5 before the seventh step."""
    plain = losses(go(tmp_path / "run", "train.qat=null").run)
    assert losses(run.run)[:6] == plain[:6] and losses(run.run)[6] != plain[6]


@pytest.mark.parametrize("stop", [3, 6, 7, 10])
def test_resuming_is_exact(run: TrainResult, tmp_path: Path, stop: int) -> None:
    """Before it rounds, just before, just after, and later: the scales are measured once, and kept."""
    go(tmp_path / "run", stop_after_steps=stop)
    begun = checkpoint.load(checkpoint.path_of(tmp_path / "run" / "checkpoints", stop))
    scales = [tensor for name, tensor in begun.optimizer.items() if "input_scale" in name]
    assert len(scales) == 11 and all(bool((scale == 1).all()) == (stop <= 6) for scale in scales)
    go(tmp_path / "run", resume="auto")
    assert losses(tmp_path / "run") == losses(run.run)
    resumed, whole = (checkpoint.load(checkpoint.path_of(at / "checkpoints", 12)) for at in (tmp_path / "run", run.run))
    for ours, theirs in ((resumed.weights, whole.weights), (resumed.optimizer, whole.optimizer)):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("forked_ranks")
def test_two_processes_are_as_one(run: TrainResult, tmp_path: Path) -> None:
    """Rank 0 alone measures the scales, so ranks have the same; the weights that they fit differ by the order of
    sums."""
    (tmp_path / "tiny_int8.yaml").write_text(canonical(small()))
    words = [
        "train",
        str(tmp_path / "tiny_int8.yaml"),
        "--run",
        str(tmp_path / "run"),
        "--target",
        "cpu",
        "--gpus",
        "2",
    ]
    assert command(words) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(run.run), rel=2e-4)
    resumed, whole = (checkpoint.load(checkpoint.path_of(at / "checkpoints", 12)) for at in (tmp_path / "run", run.run))
    for name in (name for name in whole.optimizer if "input_scale" in name):
        torch.testing.assert_close(resumed.optimizer[name], whole.optimizer[name], rtol=1e-4, atol=0)


def test_the_artifact_keeps_the_scales_that_the_run_trained_with(run: TrainResult) -> None:
    """It reads back as the run's floats, without the program that rounds, too."""
    said: list[str] = []
    result = quantize(run.run, QuantizeOptions(), said.append)
    assert any(line.startswith("inputs have the same scales as in training") for line in said)
    stored = read_verified(result.artifact).stored
    snapshot = checkpoint.load(run.checkpoint)
    spec = small()
    programs = pipeline.lower(spec, "cpu")
    schemes = allocation(spec.quant, programs.params)
    scales = trained_scales(snapshot.optimizer, integer_products(programs, schemes))
    for leader, scale in scales.items():
        assert torch.equal(torch.from_numpy(stored.tensors[leader]["input_scale"].copy()), scale)
    name = "decoder.lstm.hidden"
    nearest = schemes[name].quantize_seen(snapshot.weights[name], Seen(input_scale=scales[name]))
    assert (nearest["codes"] == stored.tensors[name]["codes"]).all()
    opened = open_model(run.run).model
    assert all(torch.equal(output, snapshot.weights[name]) for name, output in opened.named_parameters())
    assert not list(opened.buffers())


@pytest.mark.usefixtures("short_passes")
def test_bench_decodes_with_what_the_run_was_quantized_to(
    run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with weights of its own making, that is by scales which the run did not train with."""
    shutil.copytree(run.run, tmp_path / "run")
    for path in (tmp_path / "run/quantized").iterdir():
        path.unlink()
    (tmp_path / "tiny.yaml").write_text(canonical(small()))
    words = ["bench", str(tmp_path / "tiny.yaml"), "--target", "cpu", "--only", "decode", "--weights"]
    assert command([*words, str(tmp_path / "run")]) == 0
    assert "int8: the weights of" not in capsys.readouterr().err
    artifact = quantize(tmp_path / "run", QuantizeOptions(), lambda line: None).artifact
    assert command([*words, str(tmp_path / "run")]) == 0
    assert f"int8: the weights of {artifact.parent}" in "".join(capsys.readouterr().err.splitlines())


def test_another_scheme_than_that_of_training_is_calibrated(run: TrainResult, tmp_path: Path) -> None:
    """One scale for all features was not what the run trained with."""
    shutil.copytree(run.run, tmp_path / "run")
    overrides = ("quant.default.activations=per_tensor",)
    stored = read_verified(quantize(tmp_path / "run", QuantizeOptions(overrides=overrides), lambda line: None).artifact)
    learned = checkpoint.load(run.checkpoint).optimizer["rounding.input_scale/head.logits"]
    (scale,) = stored.stored.tensors["head.logits"]["input_scale"]
    assert 0.2 * float(learned.max()) < scale < 5 * float(learned.max()) and scale not in learned.tolist()[:1]


def test_what_a_decoder_is_fed_is_written_by_what_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def spied(model: Any, source: Tensor, target: Tensor, forcing: Tensor, writes: tuple[str, str]) -> Tensor:
        asked.append(writes)
        return decoder_inputs(model, source, target, forcing, writes)

    monkeypatch.setattr("specc.runtime.train.sources.feed.decoder_inputs", spied)
    result = go(tmp_path / "run", "train.teacher_forcing=0.5")
    assert asked == [("encode", "extend")] * 6 + [("encode_rounded", "extend_rounded")] * 6
    quantize(result.run, QuantizeOptions(), lambda line: None)


def test_a_run_that_ended_before_it_rounds_is_calibrated(tmp_path: Path) -> None:
    said: list[str] = []
    quantize(go(tmp_path / "run", stop_after_steps=4).run, QuantizeOptions(), said.append)
    assert not any("of the training" in line for line in said)


def test_a_run_on_the_clock_rounds_too(tmp_path: Path) -> None:
    """After its programs have run on made-up tokens, which leaves no trace."""
    result = go(tmp_path / "run", "train.steps=null", "train.budget_seconds=2")
    scales = [scale for name, scale in checkpoint.load(result.checkpoint).optimizer.items() if "input_scale" in name]
    assert result.complete and scales and all(bool((scale < 1).all()) for scale in scales)


WEIGHTS_ALONE = ("train.qat.inputs=false", "quant.default.activation_bits=16")


@pytest.mark.parametrize("stop", [4, 8])
def test_weights_alone_are_rounded_by_scales_that_are_kept(tmp_path: Path, stop: int) -> None:
    """As they are deployed, with no program for it; from a checkpoint on, as without a stop."""
    said: list[str] = []
    whole = train(TrainOptions(small(*WEIGHTS_ALONE), "cpu", "polynomial", tmp_path / "whole"), said.append)
    plain = losses(go(tmp_path / "plain", "train.qat=null").run)
    assert losses(whole.run)[:7] == plain[:7] and losses(whole.run)[7] != plain[7]
    assert any("validation, raw weights, fake-quantized: " in line for line in said)
    go(tmp_path / "parts", *WEIGHTS_ALONE, stop_after_steps=stop)
    go(tmp_path / "parts", *WEIGHTS_ALONE, resume="auto")
    assert losses(tmp_path / "parts") == losses(whole.run)
    said.clear()
    stored = read_verified(quantize(whole.run, QuantizeOptions(), said.append).artifact).stored
    assert any(line.startswith("inputs have the same scales as in training") for line in said)
    snapshot = checkpoint.load(whole.checkpoint)
    scale = snapshot.optimizer["rounding.input_scale/decoder.lstm.hidden"]
    nearest = stored.schemes["decoder.lstm.hidden"].quantize_seen(
        snapshot.weights["decoder.lstm.hidden"], Seen(input_scale=scale)
    )
    assert (nearest["codes"] == stored.tensors["decoder.lstm.hidden"]["codes"]).all()


@pytest.mark.parametrize("clock", [False, True])
def test_weights_alone_are_rounded_where_inputs_cannot_be(clock: bool) -> None:
    """In a loop over time that is no LSTM, and by a clock whose warm-down is in steps."""
    data = data_of(LSTM if clock else ADDITIVE, BY_FEATURE)
    timed = {"steps": None, "budget_seconds": 9.0, "schedule": {"warmdown_steps": 5}}
    steps = {"steps": 100, "schedule": {"warmdown_fraction": 1.0}}
    data["train"] |= {"qat": {"inputs": False}, **(timed if clock else steps)}
    pipeline.run(load(json.dumps(data))[0], "cpu")
    data["train"]["qat"] = {}
    with pytest.raises(LoweringError) as error:
        pipeline.run(load(json.dumps(data))[0], "cpu")
    assert [problem.code for problem in error.value.problems] == ["S273" if clock else "S274"]


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [(), WEIGHTS_ALONE])
def test_captured_steps_are_the_eager_ones(tmp_path: Path, alone: tuple[str, ...]) -> None:
    """Across the beginning, and from a checkpoint behind it."""
    spec = small("targets=[sm90, sm86]", *alone)
    target = choose_target(spec, None)

    def gone(name: str, **more: Any) -> list[float]:
        train(TrainOptions(spec, target, "polynomial", tmp_path / name, **more), lambda line: None)
        return losses(tmp_path / name)

    whole = gone("captured")
    assert gone("eager", compiled=False) == pytest.approx(whole, rel=2e-3)
    gone("parts", stop_after_steps=9)
    assert gone("parts", resume="auto") == pytest.approx(whole, rel=2e-3)
