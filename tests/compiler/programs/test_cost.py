"""The cost of a model, counted by hand."""

from pathlib import Path

import pytest
from tiny_models import ATTENTION, MLP, tiny

from specc.compiler import pipeline
from specc.compiler.programs.cost import boundary_bytes, flops_per_token, graph_costs, node_costs, used_parameters
from specc.compiler.report.summary import quantity
from specc.compiler.spec.check import load

SPECS = Path(__file__).parents[3] / "specs"


def test_a_token_of_gpt2_costs_797_8_megaflop_forward_and_backward() -> None:
    spec, _ = load(SPECS / "gpt2_124m.yaml")
    forward = flops_per_token(pipeline.lower(spec, "cpu"), spec.model.window)
    by_hand = 2 * 123_532_032 + 12 * 4 * 768 * 1025 / 2  # every weight once, and the half square of attention
    assert forward == pytest.approx(by_hand, rel=1e-9)
    assert 3 * forward / 1e6 == pytest.approx(797.8, abs=0.1)


@pytest.mark.parametrize(("name", "padding"), [("gpt_mini", 63 * 128), ("gpt_mlp35_base", 0), ("gpt2_124m", 47 * 768)])
def test_fusing_costs_the_same_but_for_padding(name: str, padding: int) -> None:
    spec, _ = load(SPECS / f"{name}.yaml")
    before, after = (flops_per_token(pipeline.run(spec, "cpu", until), 64) for until in ("lower", "fuse"))
    assert after - before == 2 * padding


def test_costs_of_nodes() -> None:
    programs = pipeline.lower(tiny(layers=({**ATTENTION, "kv_heads": 1}, {**MLP, "act": "silu(gate) * x"})), "cpu")
    rows, tokens = 3, 5
    costs = {cost.name: cost for cost in node_costs(programs, "train", {"B": rows, "T": tokens})}
    n = rows * tokens
    flops = {
        "embed.token": 0,
        "blocks.0.attention.h": 4 * n * 8,
        "blocks.0.attention.q": 2 * n * 8 * 8,
        "blocks.0.attention.k": 2 * n * 8 * 4,
        "blocks.0.attention.q.heads": 0,
        "blocks.0.attention.y": 4 * 8 * rows * tokens * (tokens + 1) // 2,
        "blocks.1.mlp.gate": 2 * n * 8 * 12,
        "blocks.1.mlp.act": n * 12,
        "blocks.1.mlp.x": n * 8,
        "head.logits": 2 * n * 8 * 11,
        "head.loss": 4 * n * 11,
    }
    assert {name: costs[name].flops for name in flops} == flops
    moved = {
        "embed.token": 8 * n + 4 * (11 * 8 + n * 8),
        "blocks.0.attention.q": 4 * (n * 8 + 64 + n * 8),
        "blocks.1.mlp.act": 4 * 3 * n * 12,
        "head.loss": 4 * n * 11 + 8 * n + 4,
    }
    assert {name: costs[name].bytes for name in moved} == moved
    matrices = {name for name, cost in costs.items() if cost.matrix}
    words = {name.rpartition(".")[2] for name in matrices}
    assert words == {"q", "k", "v", "y", "out", "up", "gate", "down", "logits"}
    assert len(matrices) == 2 * 8 + 1


def test_a_window_makes_attention_cheaper() -> None:
    def attention(window: int | None) -> int:
        layer = ATTENTION if window is None else {**ATTENTION, "window": window}
        programs = pipeline.lower(tiny(layers=(layer,), fuse=()), "cpu")
        return next(c.flops for c in node_costs(programs, "train", {"B": 1, "T": 10}) if c.op == "sdpa")

    assert attention(None) == 4 * 8 * 55
    assert attention(3) == 4 * 8 * (1 + 2 + 3 * 8)
    assert attention(10) == attention(None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (29_374_040, "29.4 M"), (2.5e9, "2.5 G"), (3e12, "3.0 T")],
)
def test_quantities(value: float, text: str) -> None:
    assert quantity(value) == text


def test_costs_of_a_group() -> None:
    """By hand, for x [n, 8], up [12, 8], down [8, 12] in f32."""
    group = pipeline.run(tiny(), "cpu").group("fused_mlp")
    sizes = {"B": 3, "T": 5}
    n = 15
    forward, backward = (list(graph_costs(graph, sizes)) for graph in (group.forward, group.backward))
    assert [cost.flops for cost in forward] == [2 * n * 8 * 12] * 2
    assert sum(cost.flops for cost in backward) == 4 * 2 * n * 8 * 12
    weights, saved = 2 * 12 * 8, n * 12  # relu(x) ** 2 keeps its own output, and nothing more
    assert boundary_bytes(group.forward, sizes) == 4 * (n * 8 + weights + n * 8 + saved)
    assert boundary_bytes(group.backward, sizes) == 4 * (n * 8 + weights + saved + n * 8 + n * 8 + weights)


def test_a_token_uses_the_experts_that_are_chosen_for_it() -> None:
    """gpt_moe uses as many parameters as gpt2_124m, and the routers; it has six more experts in 11 layers."""
    programs = [pipeline.lower(load(SPECS / f"{name}.yaml")[0], "cpu") for name in ("gpt2_124m", "gpt_moe")]
    dense, sparse = (sum(param.count for param in each.params) for each in programs)
    routers = 11 * (8 * 768 + 8)
    assert used_parameters(programs[0]) == dense
    assert used_parameters(programs[1]) == dense + routers == sparse - 11 * 6 * 2 * 768 * 1024
