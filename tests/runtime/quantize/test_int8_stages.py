"""Stages whose int8 forms meet in one model: LSTMs of different bits, and stages named as what int8 adds once was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import LSTM, QUANT, data_of, lines
from round_runs import go
from tiny_models import spec_of

from specc.compiler.build import compile_loaded
from specc.runtime.open_model import open_model, read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.verify.deployed import verify_deployed

FINE = {"scheme": "int8", "activation_bits": 16}


def mixed(*fine: str) -> dict[str, Any]:
    """The LSTMs' scheme with the inputs of some weights in 16 bits; both sides have 8 hidden units."""
    rules = [*QUANT["rules"], *({"match": match, **FINE} for match in fine)]
    decoder = [{**stage, "hidden": 8} if stage["kind"] == "lstm" else stage for stage in LSTM["decoder"]]
    return data_of({**LSTM, "bridge": {"kind": "linear"}, "decoder": decoder}, {**QUANT, "rules": rules})


@pytest.mark.parametrize("fine", ["encoder.lstm.*", "decoder.lstm.*", "encoder.lstm.back_hidden"])
def test_lstms_of_8_bits_stand_beside_those_of_16(fine: str) -> None:
    """Each has a kernel of its own; scores are those of the float64 reference, and step by step is the whole."""
    spec = spec_of(mixed(fine))
    for target in ("cpu", "sm90"):
        built = compile_loaded(spec.model_copy(update={"targets": (target,)}), None)
        steps = {name.rpartition("/")[2] for name in built.files if "int8_lstm_step" in name}
        assert steps == {"int8_lstm_step__h8.py", "int8_lstm_step__h8_i16.py"}
    checks = list(verify_deployed(spec, ("cpu",)))
    assert [check for check in checks if not check.ok] == []
    kernels = [check.name for check in checks if check.name.startswith("kernel int8_lstm_step__h8")]
    assert len(set(kernels)) == 2


@pytest.mark.parametrize("inputs", [False, True])
def test_a_stage_named_like_a_loop_is_no_loop(tmp_path: Path, inputs: bool) -> None:
    """It trains, is quantized, and is opened, beside the loops of `lstm`."""
    forward = {"kind": "mlp", "name": "lstm_forward", "hidden": 12, "act": "gelu(x)"}
    back = {"kind": "lstm", "name": "lstm_back", "hidden": 8, "biases": 1}
    model = {**LSTM, "encoder": [*LSTM["encoder"], forward, back], "decoder": [*LSTM["decoder"], forward]}
    model["bridge"] = {"kind": "linear"}
    overrides = [] if inputs else ["train.qat={below: 0.5, inputs: false}"]
    run = go(tmp_path / "run", *overrides, model=model)
    result = quantize(run.run, QuantizeOptions(), lambda line: None)
    stored = read_verified(result.artifact).stored
    whole = [name for name, scheme in stored.schemes.items() if scheme.integer]
    assert {"encoder.lstm.back_hidden", "encoder.lstm_forward.up", "encoder.lstm_back.hidden"} < {*whole}
    deployed: Any = open_model(result.artifact, "cpu", "cpu").line_model
    floats: Any = open_model(run.run).model
    source, target = lines(5, 32)
    with torch.no_grad():
        output, wanted = deployed.score(source, target), floats.score(source, target)
    assert float((output - wanted)[target != 0].abs().mean()) < 0.1
