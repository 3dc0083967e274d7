"""A spec that uses the words for optimizers, averages and rounding, from training to its artifact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from log_lines import read_log
from run_samples import SPEC, write_text

from specc.compiler import pipeline
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.train import TrainOptions, train

MATRICES = '"blocks.*.{q,k,v,out,up,gate,down}"'
TAPER = "{at: [[0, 0.095], [0.7, 0.095], [1, 0.0475]]}"
WORDS = (
    "targets=[cpu]",
    "model.blocks.count=2",
    "model.dim=32",
    "model.context=32",
    "train.micro_batch=4",
    "train.tokens_per_step=256",
    "train.steps=24",
    "train.validate_every=0",
    "train.schedule={warmup_steps: 2, warmdown_fraction: 0.75, floor: 0.1}",
    "train.average={kind: swa, every: 2, below: 0.5}",
    "train.qat={below: 0.4}",
    "quant.default.bits=4",
    "quant.promote=null",
    "quant.calibrate={sequences: 4, batch: 4}",
    "eval={batch: 4}",
)


def spec(method: str) -> Spec:
    muon = f"kind: muon, match: {MATRICES}, lr: 0.02, method: {method}, weight_decay: {TAPER}"
    entries = f"[{{{muon}, equalize_rows: true, second_moment: 0.9}}, {{kind: adamw, match: '*', lr: 0.01}}]"
    return load(SPEC, (*WORDS, f"train.optimizers={entries}"))[0]


@pytest.mark.parametrize("method", ["polar_express", "turbo"])
def test_it_learns_rounds_late_and_resumes_exactly(tmp_path: Path, method: str) -> None:
    data = str(write_text(tmp_path / "data"))
    cut, whole = tmp_path / "cut", tmp_path / "whole"

    def go(run: Path, stop: int | None, resume: bool = False) -> None:
        options = TrainOptions(spec(method), "cpu", data, run, stop_after_steps=stop, cache=tmp_path / "cache")
        train(replace(options, resume="auto") if resume else options, lambda _: None)

    go(whole, None)
    for stop, resume in ((11, False), (21, True), (None, True)):
        go(cut, stop, resume)
    losses = [float(line["loss"]) for line in read_log(whole / "log.jsonl") if line["event"] == "step"]
    again = [float(line["loss"]) for line in read_log(cut / "log.jsonl") if line["event"] == "step"]
    assert losses == again and len(losses) == 24 and losses[-1] < losses[0] - 0.5
    run = Run.open(whole)
    newest = checkpoint.latest(run.checkpoints, print)
    assert newest is not None
    snapshot = checkpoint.load(newest)
    assert snapshot.average is not None and float(snapshot.optimizer["swa.count"]) == 4  # steps 18, 20, 22 and 24
    assert any(name.startswith("muon.second_moment/") for name in snapshot.optimizer)
    assert any(not torch.equal(snapshot.average[name], snapshot.weights[name]) for name in snapshot.weights)
    result = quantize(whole, QuantizeOptions(cache=tmp_path / "cache", max_tokens=400), lambda _: None)
    schemes = allocation(run.spec.quant, pipeline.lower(run.spec, "cpu").params)
    assert {row.bits for row in result.rows if schemes[row.name].has_grid} == {4.0, 8.0}
