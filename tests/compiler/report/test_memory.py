"""The memory of a step by what it holds."""

import pytest
from run_samples import small_spec

from specc.compiler import pipeline
from specc.compiler.report.memory import Memory
from specc.compiler.report.step import step_of
from specc.compiler.spec.spec import Spec

PASSES = ("saved activations", "saved by fused groups", "gradients and temporaries")


def memory(spec: Spec, target: str = "cpu") -> Memory:
    return step_of(spec, pipeline.plan(spec, target, "")).memory


def test_the_total_is_the_sum_of_the_parts() -> None:
    spec = small_spec("targets=[cpu, sm90]")
    for target in spec.targets:
        parts = memory(spec, target).parts
        assert memory(spec, target).total == sum(parts.values()) and all(parts.values())
        count = sum(param.count for param in pipeline.lower(spec, target).params)
        assert parts["masters"] == parts["average"] == 4 * count
        assert parts["gradients"] == (4 if target == "cpu" else 6) * count
        assert parts.get("weights of the products", 0) == (0 if target == "cpu" else 2 * count)


def test_a_run_without_an_average_holds_none() -> None:
    assert "average" not in memory(small_spec("train.average=null")).parts


def test_activations_grow_with_the_rows() -> None:
    """In proportion, apart from padded weights and rotary angles, which rows share."""
    sizes = (2, 4, 8)
    parts = [memory(small_spec(f"train.micro_batch={rows}", "train.tokens_per_step=256")).parts for rows in sizes]
    for name in ("saved activations", "saved by fused groups"):
        two, four, eight = (each[name] for each in parts)
        assert eight - four == 2 * (four - two) > 0


def test_compiled_code_saves_less_than_eager_code() -> None:
    spec = small_spec("targets=[cpu, sm90]", "fuse=[]")
    eager, compiled = memory(spec), memory(spec, "sm90")
    assert eager.groups == compiled.groups == {}
    assert eager.parts["saved activations"] > 2 * compiled.parts["saved activations"]  # which are bf16


def test_a_fused_loss_on_the_cpu_has_temporaries_beside_its_logits_and_their_gradient() -> None:
    """The gradient is saved. At the peak are the logits, log_p, the slope of the softcap, the gradient of f, its
    product with the slope, and that divided by the number of tokens."""
    rows = ("train.micro_batch=64", "train.tokens_per_step=2048")
    capped, plain = (
        [memory(small_spec(*more, *rows, f"model.vocab={vocab}")).total for vocab in (8000, 4000)]
        for more in ((), ("model.head.softcap=null", "fuse=[{head: [logits, loss]}]"))
    )
    logits = 4 * 4000 * 64 * 32
    assert round((capped[0] - capped[1]) / logits) == 6
    assert round((plain[0] - plain[1]) / logits) == 4  # without the slope and the product


def test_unfused_logits_are_saved_and_have_a_gradient() -> None:
    """Rows and vocabulary are so large that the logits, the softcap and the loss are nearly everything."""
    wide, narrow = (
        memory(small_spec("fuse=[]", f"model.vocab={vocab}", "train.micro_batch=64", "train.tokens_per_step=2048"))
        for vocab in (8000, 4000)
    )
    logits = 4 * 4000 * 64 * 32
    saved = wide.parts["saved activations"] - narrow.parts["saved activations"]
    assert saved == 2 * logits  # tanh of the softcap, and the probabilities of the loss
    assert wide.parts["gradients and temporaries"] - narrow.parts["gradients and temporaries"] >= logits


def test_kernels_of_a_gpu_write_the_gradient_of_a_loss_over_its_logits() -> None:
    """At the peak, no other tensor has the size of the logits."""
    rows = ("targets=[sm90]", "train.micro_batch=64", "train.tokens_per_step=2048")
    plain = ("model.head.softcap=null", "fuse=[{head: [logits, loss]}]")
    parts = [memory(small_spec(*rows, *plain, f"model.vocab={vocab}"), "sm90").parts for vocab in (64000, 32000)]
    passes = [sum(part[name] for name in PASSES) for part in parts]
    assert (passes[0] - passes[1]) / (2 * 32000 * 64 * 32) == pytest.approx(1, rel=0.1)
