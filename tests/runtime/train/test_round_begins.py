"""Where a run begins to round for int8 it measures what products read: all until then is kept, whatever comes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import BLOCKS
from log_lines import read_log
from round_runs import go

from specc.runtime.calibration.input_scales import InputScales
from specc.runtime.errors import QuantizeError
from specc.runtime.open_model import read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint

WAVES = {
    **BLOCKS,
    "encoder": [{"kind": "embed", "dim": 16, "positions": "sinusoidal"}, *BLOCKS["encoder"][1:]],
    "decoder": [{"kind": "embed", "dim": 16, "positions": "sinusoidal"}, *BLOCKS["decoder"][1:]],
}


def committed(folder: Path) -> list[int]:
    """The steps behind which the log tells of a checkpoint."""
    return [record["step"] for record in read_log(folder / "log.jsonl") if record["event"] == "checkpoint"]


@pytest.mark.parametrize("alone", [(), ("train.qat.inputs=false",)], ids=["inputs", "weights alone"])
def test_what_cannot_be_measured_loses_nothing(
    alone: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there the run goes on as one that did not fail."""

    def failing(self: InputScales, weights: Any) -> None:
        raise QuantizeError("no scale", "none")

    with monkeypatch.context() as patch:
        patch.setattr(InputScales, "measure", failing)
        with pytest.raises(QuantizeError, match="no scale"):
            go(tmp_path / "run", *alone)
    (begun,) = committed(tmp_path / "run")
    assert begun in (6, 7)
    go(tmp_path / "run", *alone, resume="auto")
    whole = go(tmp_path / "whole", *alone)
    resumed, other = (
        checkpoint.load(checkpoint.path_of(at / "checkpoints", 12)) for at in (tmp_path / "run", whole.run)
    )
    assert all(torch.equal(resumed.weights[name], other.weights[name]) for name in other.weights)
    assert committed(whole.run) == [begun, 12]


def test_nothing_more_is_kept_where_nothing_is_measured(tmp_path: Path) -> None:
    assert committed(go(tmp_path / "run", "train.qat=null").run) == [12]


def test_positions_that_are_waves_are_trained_for_int8_and_stored(tmp_path: Path) -> None:
    """Their ranges are measured in the weights' precision."""
    result = go(tmp_path / "run", model=WAVES)
    assert result.complete
    stored = read_verified(quantize(result.run, QuantizeOptions(), lambda line: None).artifact).stored
    assert stored.schemes["decoder.blocks.0.attention.q"].integer
