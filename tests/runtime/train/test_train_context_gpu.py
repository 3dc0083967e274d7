"""Phases of a run on a GPU: each is compiled and captured before the clock starts, and trains as calling it does."""

from pathlib import Path

import pytest
import torch
from run_samples import small_spec
from test_train_context import GROWING, trainer_of
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu
LATE = (
    "targets=[sm90, cpu]",
    "fuse=[]",
    "train.steps=12",
    "model.blocks.count=5",
    "model.blocks.order={at: [[0, 0..4], [0.5, 0..1 0..4]]}",
    "model.blocks.between=[{name: skips, where: run // (runs // 2) == 1, learn: {scale: {init: 1}, share: {init: 0}}, "
    "read: scale * output(2 * (runs // 2) - 1 - run) + sigmoid(share) * "
    "(x - scale * output(2 * (runs // 2) - 1 - run))}]",
    "model.blocks.layers.0.bos=256",
    "model.blocks.layers.0.mask=j <= i and document(i) == document(j)",
    'quant.rules.1.match="*.{residual,q_gain,scale,share,carry,to_attention,to_mlp}"',
)


def test_nothing_is_compiled_at_a_switch_and_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    spec = small_spec(*GROWING, *LATE)
    device, plain = trainer_of(spec, tmp_path / "gpu", "sm90", True), trainer_of(spec, tmp_path / "cpu")
    device.warm_up(257)
    assert torch.cuda.memory_allocated() < 2**30
    compiled, graphs = dict(counters["stats"]), [step_pass._graph for step_pass in device._passes]  # type: ignore[attr-defined]
    assert len(graphs) == 4 and all(graph is not None for graph in graphs)
    results = [step.loss for _ in range(12) for step in device.advance()] + [step.loss for step in device.settle()]
    wanted = [step.loss for _ in range(12) for step in plain.advance()]
    assert dict(counters["stats"]) == compiled
    assert [step_pass._graph for step_pass in device._passes] == graphs  # type: ignore[attr-defined]
    assert results == pytest.approx(wanted, rel=0.05)  # bf16 against f32, over 12 steps
    for trainer in (device, plain):
        trainer.loader.close()


def test_blocks_of_documents_are_captured_and_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Rows of two blocks, heads of 16: attention computes only the blocks that some token sees, and its tables are made
    anew at each replay."""
    rows = ("model.context=256", "train.tokens_per_step=1024", "model.dim=64", "train.steps=8")
    mask = "j <= i and i - j < 200 and document(i) == document(j)"
    documents = ("model.blocks.layers.0.bos=256", f"model.blocks.layers.0.mask={mask}")
    spec = small_spec("targets=[sm90, cpu]", "fuse=[]", *rows, *documents)
    device, plain = trainer_of(spec, tmp_path / "gpu", "sm90", True), trainer_of(spec, tmp_path / "cpu")
    device.warm_up(257)
    assert all(step_pass._graph is not None for step_pass in device._passes)  # type: ignore[attr-defined]
    results = [step.loss for _ in range(8) for step in device.advance()] + [step.loss for step in device.settle()]
    wanted = [step.loss for _ in range(8) for step in plain.advance()]
    assert results == pytest.approx(wanted, rel=0.05)
    for trainer in (device, plain):
        trainer.loader.close()


def test_attention_with_sinks_trains_as_on_the_cpu(tmp_path: Path) -> None:
    """Torch would pad rows of 1,057 numbers, and read the gradient of the log-sum-exp as if it had not."""
    rows = ("model.context=1057", "train.tokens_per_step=2114", "train.micro_batch=2", "model.dim=64", "train.steps=3")
    window = ("model.blocks.layers.0.mask=j <= i and i - j < 300", "model.blocks.layers.0.sinks=true")
    sinks = 'quant.rules.1.match="*.{residual,q_gain,sinks}"'
    spec = small_spec("targets=[sm90, cpu]", "fuse=[]", *rows, *window, sinks)
    device, plain = trainer_of(spec, tmp_path / "gpu", "sm90", True), trainer_of(spec, tmp_path / "cpu")
    results = [step for _ in range(3) for step in device.advance()] + device.settle()
    wanted = [step for _ in range(3) for step in plain.advance()]
    for value in ("loss", "grad_norm"):
        expected = [getattr(step, value) for step in wanted]
        assert [getattr(step, value) for step in results] == pytest.approx(expected, rel=0.05)
    for trainer in (device, plain):
        trainer.loader.close()
