"""MLPs and mixtures of experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from block_checks import check_block
from tiny_models import ATTENTION, MLP

MOE = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16, "act": "silu(gate) * x"}
CLASHING = ("block", "model", "weights", "linear_relu2", "x", "h", "cos", "f", "tensor", "positions", "blocks", "act")


def moe(**options: Any) -> dict[str, Any]:
    return {"layers": (ATTENTION, {**MOE, **options}), "fuse": ()}


ACTIVATIONS = {
    "gelu": "gelu(x)",
    "gelu_tanh": "gelu_tanh(x)",
    "silu": "silu(x)",
    "linear": "2 * x",
    "odd": "where(x > 0.5, tanh(x) * x, abs(x) - 0.25)",
    "bump": {"expr": "exp(-x ** 2)", "name": "bump"},
    "swiglu": "silu(gate) * x",
    "geglu": "gelu(gate) * x",
    "bilinear": "gate * x",
}

CASES: Mapping[str, dict[str, Any]] = {
    "activations": {
        "layers": tuple({**MLP, "name": name, "act": act} for name, act in ACTIVATIONS.items()),
        "fuse": tuple({f"blocks.*.{name}": ["up", "act", "down"]} for name in ACTIVATIONS),
        "count": 1,
    },
    "two_mlps": {
        "layers": (ATTENTION, {**MLP, "name": "wide", "hidden": 16}, {**MLP, "name": "deep", "act": "gelu(x)"}),
        "fuse": ({"blocks.*.wide": ["up", "act", "down"]}, {"blocks.*.deep": ["up", "act", "down"]}),
    },
    "two_mlps_of_one_kind": {
        "layers": (ATTENTION, {**MLP, "name": "a"}, {**MLP, "name": "b"}),
        "fuse": ({"blocks.*.{a,b}": ["up", "act", "down"]},),
    },
    "names_of_the_generated_code": {
        "layers": (
            {**ATTENTION, "name": "attend", "rope": {}},
            *({**MLP, "name": name, "hidden": 9 + i} for i, name in enumerate(CLASHING)),
        ),
        "fuse": tuple({f"blocks.*.{name}": ["up", "act", "down"]} for name in CLASHING),
    },
    "only_mlp": {"layers": (MLP,)},
    "mlp_ratio": {"layers": (ATTENTION, {"kind": "mlp", "ratio": 3.5, "act": "leaky_relu(x, 0.5) ** 2"})},
    "moe_switch": moe(top_k=1, act="relu(x) ** 2"),
    "moe_sigmoid": moe(router={"score": "sigmoid", "normalize": True, "bias": True, "scale": 2.5}, shared_experts=2),
    "moe_all_experts": moe(top_k=4, experts=4),
    "moe_of_the_token": moe(router_input="x0", top_k=3),
    "moe_after_a_dense_layer": {
        **moe(name="mlp", router={"normalize": True}),
        "count": 3,
        "blocks": {"changes": [{"where": "layer < 1", "mlp": {**MLP, "bias": True}}]},
    },
    "moe_with_biases": moe(bias=True, router={"normalize": True}),
    "moe_in_groups": moe(experts=8, top_k=3, bias=("down",), router={"bias": True, "groups": 4, "top_groups": 2}),
    "moe_in_a_loop": {**moe(router={"bias": True}), "blocks": {"order": "0..1 0..1"}},
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_equals_its_reference(case: str, tmp_path: Path) -> None:
    check_block(CASES[case], tmp_path)
