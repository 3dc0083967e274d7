"""Inputs of int8 products that their scales do not reach to: the error that is reported counts what is cut off."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import BY_FEATURE, LSTM, data_of, lines, quantized_model
from round_runs import go
from tiny_models import spec_of
from torch import Tensor

from specc.compiler import pipeline
from specc.runtime.calibration.input_ranges import input_ranges
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.quantize.report import InputRow, clipped_line, input_report

NAME = "encoder.lstm.input"


def scene(share: float, bits: int, by_feature: bool = True) -> tuple[InputRow, tuple[InputRow, ...], Tensor, Tensor]:
    """The row of one input whose scale reaches to `share` of what calibration gave it, and all rows; the input, and
    what codes of this scale stand for."""
    activations = "per_channel" if by_feature else "per_tensor"
    quant = {**BY_FEATURE, "default": {"scheme": "int8", "activations": activations, "activation_bits": bits}}
    models = quantized_model(spec_of(data_of(LSTM, quant)), uneven=1.0)
    arrays = models.stored.tensors[NAME]
    arrays["input_scale"] = arrays["input_scale"] * share
    scale = torch.from_numpy(arrays["input_scale"])
    batches = [dict(zip(("source", "target"), lines(100 + i), strict=True)) for i in range(8)]
    programs = pipeline.lower(models.spec, "cpu")
    seen = input_ranges(programs, models.sources, batches, models.weights, scales={NAME: scale})
    x = torch.cat([models.weights["encoder.embed.token"][batch["source"]] for batch in batches]).double()
    steps = (x / scale).clamp(-127, 127)
    fine = 1 if bits == 8 else 254
    rows = input_report(models.sources, seen, models.stored)
    return next(row for row in rows if row.weights[0] == NAME), rows, x, (steps * fine).round() / fine * scale


@pytest.mark.parametrize("by_feature", [True, False])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("share", [0.25, 0.7])
def test_the_error_of_an_input_counts_what_is_cut_off(share: float, bits: int, by_feature: bool) -> None:
    row, rows, x, rounded = scene(share, bits, by_feature)
    lost = (rounded - x).square().mean().sqrt() / x.square().mean().sqrt()
    assert row.error == pytest.approx(float(lost), rel=0.02) and row.error > 0.02
    assert row.reach == pytest.approx(1 / share, rel=1e-5)
    assert 0 < row.clipped < 1
    warning = clipped_line(rows)
    wanted = f"{NAME} (to {1 / share:.3g} times the range, {row.clipped:.2%} of values)"
    assert warning.startswith("inputs exceed the range of their scale from training and are clipped: ")
    assert wanted in warning and warning.count("times the range") == 1


@pytest.mark.parametrize("bits", [8, 16])
def test_nothing_is_cut_off_within_the_range(bits: int) -> None:
    row, rows, x, rounded = scene(1.0, bits)
    lost = (rounded - x).square().mean().sqrt() / x.square().mean().sqrt()
    assert row.clipped == 0 and row.error == pytest.approx(float(lost), rel=0.15) and row.error < 0.02
    assert row.reach <= 1 + 1e-6 and clipped_line(rows) == ""


def test_quantize_says_which_inputs_have_outgrown_their_scales(tmp_path: Path) -> None:
    """A run that rounds from its second step on measures them of a model that has learned nothing; what it learns is
    beyond them, and where it learns next to nothing more, nothing is."""
    results: list[dict[str, Any]] = []
    for name, rate in (("learns", 0.01), ("stays", 1e-7)):
        optimizers = f'train.optimizers=[{{match: "*", kind: adamw, lr: {rate}}}]'
        run = go(tmp_path / name, "train.qat.below=0.95", optimizers)
        said: list[str] = []
        result = quantize(run.run, QuantizeOptions(), said.append)
        inputs = json.loads((result.artifact.parent / "report.json").read_text())["inputs"]
        (hidden,) = [row for row in inputs if row["weights"] == ["decoder.lstm.hidden"]]
        warning = [line for line in said if "are clipped" in line]
        results.append({**hidden, "warnings": warning})
    learned, stayed = results
    assert learned["reach"] > 1.5 and learned["clipped"] > 0.01 and learned["error"] > 0.05 > stayed["error"]
    assert stayed["warnings"] == [] and stayed["clipped"] == 0
    assert len(learned["warnings"]) == 1 and "decoder.lstm.hidden (to " in learned["warnings"][0]
