"""Runs of models with experts: the bias balances the load, is saved, and the run can be quantized and scored."""

import sys
from pathlib import Path

import pytest
import torch
from log_lines import read_log
from run_samples import EXPERTS, model_of, small_spec, write_text

from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.metrics.expert_load import expert_loads, imbalance
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint
from specc.runtime.train.train import TrainOptions, train

LOSSES = "train.losses=[{kind: next_token}, {kind: auxiliary, name: mlp.balance, weight: 0.01}]"


def run(folder: Path, *overrides: str, steps: int | None = None, name: str = "run") -> Path:
    spec = small_spec(*EXPERTS, LOSSES, "train.steps=6", *overrides)
    data = str(write_text(folder / "data")) if not (folder / "data").exists() else str(folder / "data")
    options = TrainOptions(spec, "cpu", data, folder / name, resume="auto", stop_after_steps=steps, cache=folder / "c")
    return train(options, lambda line: None).run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(folder / "checkpoints", lambda text: None)
    assert newest is not None
    return dict(checkpoint.load(newest).weights)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder / "log.jsonl") if record["event"] == "step"]


def test_a_resumed_run_is_the_whole_run_and_the_bias_moves_by_the_rate(tmp_path: Path) -> None:
    whole = run(tmp_path, "train.schedule={warmdown_steps: 0}", name="whole")
    parts = [run(tmp_path, "train.schedule={warmdown_steps: 0}", steps=steps, name="parts") for steps in (2, 4, 6)]
    assert losses(parts[-1]) == losses(whole)
    first, second = weights(whole), weights(parts[-1])
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for name in ("blocks.0.mlp.router_bias", "blocks.1.mlp.router_bias"):
        moves = first[name] / 0.01
        assert moves.abs().max() >= 1 and moves.abs().max() <= 6 + 1e-4
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)


def test_validations_log_the_load_of_each_expert(tmp_path: Path) -> None:
    folder = run(tmp_path, "train.validate_every=3", "train.validate_tokens=256")
    records = read_log(folder / "log.jsonl")
    scored = [(record["step"], record["weights"]) for record in records if record["event"] == "validation"]
    loads = [record for record in records if record["event"] == "experts"]
    assert [(record["step"], record["weights"]) for record in loads] == scored and len(scored) >= 3
    for record in loads:
        assert list(record["loads"]) == ["blocks.0.mlp", "blocks.1.mlp"]
        assert all(len(load) == 4 and abs(sum(load) - 1) < 1e-9 for load in record["loads"].values())


def test_loads_are_counts_of_the_chosen_experts() -> None:
    """Against the choice of the router alone, of a model of one layer."""
    model = model_of(small_spec(*EXPERTS, "model.blocks.count=1"), seed=3).model
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(0))
    chosen: list[torch.Tensor] = []
    module = sys.modules[type(model).__module__]
    choose = vars(module)["top_experts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "top_experts", lambda scores, count: chosen.append(choose(scores, count)) or chosen[-1])
        loads = expert_loads(model, model.score, ids, targets)  # type: ignore[arg-type]
    counts = torch.bincount(chosen[0].flatten(), minlength=4).double() / chosen[0].numel()
    assert loads == {"blocks.0.mlp": counts.tolist()}
    assert imbalance(loads) == pytest.approx(4 * float(counts.max())) and imbalance(loads) > 1.1


def test_a_run_is_quantized_by_expert_and_scored(tmp_path: Path) -> None:
    folder = run(tmp_path)
    result = quantize(folder, QuantizeOptions(cache=tmp_path / "c", max_tokens=500), lambda line: None)
    rows = {row.name: row for row in result.rows}
    row = rows["blocks.1.mlp.up"]
    assert row.scheme.endswith("gptq, per row") and row.solution is not None
    assert row.output_error is not None and 0 < row.output_error < 0.2
    assert rows["blocks.1.mlp.router"].scheme == "f16"
    scored = evaluate(result.artifact, EvaluateOptions(data=str(tmp_path / "data"), cache=tmp_path / "c"))
    assert scored is not None
