"""PLAN.md and explain state where kernels draw dropout and round to 8 bits, and why Torch does elsewhere."""

from run_samples import small_spec

from specc.compiler import pipeline
from specc.compiler.report.explain import explain
from specc.compiler.report.plan_page import joined, products_of_8_bits

SETS = (
    "targets=[sm90]",
    "model.blocks.layers.1.dropout=0.25",
    'train.precision={fp8: [{match: "blocks.*.mlp.*", scaling: delayed}]}',
    'fuse=[{"blocks.*.mlp": [up, act, down, dropped, x]}]',
)


def test_plan_and_explain_state_what_kernels_join() -> None:
    plan = pipeline.plan(small_spec(*SETS), "sm90", "specs/sample.yaml")
    facts = list(joined(plan))
    assert facts[:2] == [
        "Rounded to 8 bits by the kernel of blocks.*.mlp.up, blocks.*.mlp.down.dgrad.",
        "Dropout in the kernel of blocks.*.mlp.down.",
    ]
    assert any("blocks.*.mlp.dropped.grad: the kernel of a product draws dropout only if" in fact for fact in facts[2:])
    assert any("blocks.*.mlp.up.x_codes, blocks.*.mlp.up.codes" in fact for fact in facts[2:])
    assert list(products_of_8_bits(plan)) == [
        "blocks.*.mlp.up, blocks.*.mlp.down (fp8 linear, a scale per tensor, delayed)"
    ]
    rows = {row.label: row for row in explain(plan, "blocks.*.mlp.*")}
    kernel = rows["blocks.*.mlp.down + dropped + x"]
    assert kernel.kernel == "linear_triton (triton)" and "dropout" in dict(kernel.rejected)["gemm_evt"]
    assert "scales" in dict(rows["blocks.*.mlp.up + act + down.x_codes"].rejected)["gemm_evt"]
    (reason,) = rows["blocks.*.mlp.dropped.grad"].rejected
    assert "only if nothing else reads the product" in reason[1]
