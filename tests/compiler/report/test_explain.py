"""Explanations name the kernels of the block that was asked for, and refuse blocks that do not exist."""

from pathlib import Path

import pytest
from tiny_models import ATTENTION, MLP, tiny

from specc.compiler.build import compile_spec, plan_loaded
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import flatten
from specc.compiler.report.explain import explain

ROOT = Path(__file__).parents[3]
WINDOW = {"where": "layer % 2 == 1", "attention": {"mask": "j <= i and i - j < 4"}}


@pytest.fixture(scope="module")
def plan() -> Plan:
    spec = tiny(blocks={"count": 4, "layers": [ATTENTION, MLP], "changes": [WINDOW]})
    return plan_loaded(spec, None, ("cpu",)).plans["cpu"]


@pytest.mark.parametrize(
    ("node", "windows"), [("blocks.0", [False]), ("blocks.3", [True]), ("blocks.*", [False, True])]
)
def test_a_path_of_one_block_names_its_kernel(plan: Plan, node: str, windows: list[bool]) -> None:
    rows = list(explain(plan, f"{node}.attention.y"))
    assert sorted({"i - j" in row.op or "lt_4" in row.op for row in rows}) == windows


@pytest.mark.parametrize("node", ["blocks.9.attention.y", "blocks.4.mlp.up", "blocks.*.mlp.gone"])
def test_other_blocks_have_no_kernel(plan: Plan, node: str) -> None:
    assert not list(explain(plan, node))


@pytest.mark.parametrize("name", ["poly_transformer", "poly_lstm", "gpt_moe"])
def test_each_node_of_a_program_is_explained(name: str) -> None:
    plan = compile_spec(ROOT / f"specs/{name}.yaml").plans["sm90"]
    program = plan.programs.program("train")
    nodes = [node.name for node in flatten(plan.programs, program).nodes if "." in node.name]
    assert [node for node in nodes[:: max(1, len(nodes) // 20)] if not list(explain(plan, node))] == []
