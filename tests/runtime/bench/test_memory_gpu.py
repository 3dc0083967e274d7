"""The forecast of memory on a GPU: within 10 % of the peak of the allocator, with CUDA graphs."""

import gc
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from run_samples import SPEC

from specc.compiler import pipeline
from specc.compiler.build import plan_spec
from specc.compiler.report.step import step_of
from specc.compiler.spec.check import load
from specc.runtime.bench.step import WARM_UP, random_trainer
from specc.runtime.model.load import instantiate

pytestmark = pytest.mark.gpu(gigabytes=40)  # what the largest forecast needs


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt_mlp35", ()),
        ("gpt_mlp35", ("fuse=[]",)),
        ("gpt_mlp35", ("train.recompute=[mlp]",)),
        ("gpt_mlp35", ("train.recompute=[block]",)),
        ("gpt2_124m", ()),
        ("nanochat_d12", ("train.micro_batch=16",)),
    ],
)
def test_the_forecast_is_within_10_percent_of_the_peak(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """In steps of two micro-batches, which need as much memory as longer ones."""
    path = SPEC.with_name(f"{name}.yaml")
    rows = load(path, more)[0]
    size = f"train.tokens_per_step={2 * rows.train.at_once() * rows.model.window}"
    planned = plan_spec(path, ("targets=[sm90, cpu]", *more, size))
    spec = planned.spec
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with ExitStack() as stack:
        trainer = random_trainer(instantiate(spec, "sm90", tmp_path, lock=planned.lock), torch.device("cuda"), stack)
        for _ in range(WARM_UP):
            trainer.advance()
        trainer.settle()
        peak = torch.cuda.max_memory_allocated() - before
    memory = step_of(spec, pipeline.plan(spec, "sm90", "", planned.lock)).memory
    assert memory.total == pytest.approx(peak, rel=0.1), memory.parts
