"""The values that the plan expects compiled code to save are those that Torch's compiler saves."""

from pathlib import Path

import pytest
from partitioned import FIVE_BLOCKS, partition, saved_bytes
from run_samples import SPEC

from specc.compiler import pipeline
from specc.compiler.report.step import step_of
from specc.compiler.spec.check import load

# Models whose blocks are all equal have two of them.
SMALL = ("train.micro_batch=16", "model.context=256")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt_mini", ()),
        ("gpt_mini", ("fuse=[]",)),
        ("gpt_mlp35", FIVE_BLOCKS),
        ("gpt2_124m", ("model.vocab=4096", "model.blocks.count=2")),
        ("gpt2_124m", ("model.vocab=4096", "model.blocks.count=2", "fuse=[]")),
        ("nanochat_d12", ("model.vocab=4096", "model.blocks.count=4")),
        ("llama3_1b", ("train.context=256", "model.vocab=4096", "model.dim=512", "model.blocks.count=2")),
    ],
)
def test_the_saved_bytes_are_within_5_percent_of_those_of_torch(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    size = f"train.tokens_per_step={16 * 256}"
    spec = load(SPEC.with_name(f"{name}.yaml"), (*SMALL, size, *overrides))[0]
    forward, _ = partition(spec, "sm90", tmp_path)
    parts = step_of(spec, pipeline.plan(spec, "sm90", "")).memory.parts
    expected = parts["saved activations"] + parts.get("saved by fused groups", 0)
    assert expected == pytest.approx(saved_bytes(forward), rel=0.05)
