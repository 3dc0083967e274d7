"""Norms and biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from block_checks import check_block
from tiny_models import ATTENTION, MLP

GATED = {**MLP, "act": "silu(gate) * x"}


def norm(**options: Any) -> dict[str, Any]:
    return {"norm": options, "blocks": {"norm": options}}


CASES: Mapping[str, dict[str, Any]] = {
    "norms_before_and_behind": {
        "blocks": {"norm": {"kind": "rms", "weight": "1 + w", "places": ["before", "after"]}},
        "norm": {"kind": "rms", "weight": "1 + w"},
    },
    "norms_after_scaled": {
        "blocks": {"norm": {"kind": "layer", "places": ["after"], "scale": "1/(layer + 1)"}},
        "layers": ({**ATTENTION, "residual": "learned"}, {**MLP, "residual": 0.5}),
    },
    "norms_of_the_stream": {
        "blocks": {"norm": {"kind": "layer", "places": ["stream"]}},
        "norm": None,
        "layers": (ATTENTION, {**MLP, "write": "x + 0.5 * y"}),
    },
    "norms_of_the_stream_of_parallel_layers": {
        "blocks": {
            "norm": {"kind": "rms", "weight": "1 + w", "places": ["before", "stream"], "scale": "1/(layer + 1)"},
            "write": "x + attention + mlp",
        },
    },
    "no_norms": {"blocks": {"norm": None}, "norm": None},
    "no_norm_in_one": {"blocks": {"changes": ({"where": "layer == 1", "norm": None},)}, "count": 2},
    "residual_behind_the_norm": {
        "blocks": {"norm": {"kind": "layer"}},
        "layers": (ATTENTION, {**MLP, "write": "h + y"}),
    },
    "rms_bias": norm(kind="rms", weight="w", bias=True),
    "layer_norm_without_bias": norm(kind="layer", bias=False),
    "layer_norm_without_weight": norm(kind="layer", weight="none", bias=False),
    "layer_norm_with_bias_alone": norm(kind="layer", weight="none"),
    "layer_norm_of_one_plus_weight": norm(kind="layer", weight="1 + w"),
    "parallel_with_one_norm": {"blocks": {"write": "x + attention + mlp", "norm": {"kind": "layer", "shared": True}}},
    "biases": {
        "layers": ({**ATTENTION, "bias": True}, {**MLP, "bias": True}),
        "head": {"tied": False, "bias": True, "softcap": 3},
    },
    "biases_fused": {
        "layers": (ATTENTION, {**MLP, "bias": True}),
        "fuse": ({"blocks.*.mlp": ["up", "up.biased", "act", "down", "down.biased"]},),
    },
    "biases_of_gates_fused": {
        "layers": (ATTENTION, {**GATED, "bias": ["up", "gate"]}),
        "fuse": ({"blocks.*.mlp": ["up", "up.biased", "gate", "gate.biased", "act", "down"]},),
    },
    "rms_eps": norm(kind="rms", eps=0.1),
    "rms_scale_by_layers": norm(kind="rms", affine=True, scale="1/sqrt(layers)"),
    "rms_scale_by_layer": {"blocks": {"norm": {"kind": "rms", "scale": "1/sqrt(layer + 1)"}}, "count": 3},
    "layer_norm_scaled": {"blocks": {"norm": {"kind": "layer", "scale": "1/(layer + 2)"}}},
    "norms_by_layer": {
        "blocks": {
            "norm": {"kind": "rms", "weight": "w"},
            "changes": [
                {"where": "layer == 1", "norm": {"kind": "layer", "bias": False}},
                {"where": "layer == 2", "norm": {"places": ["after"], "weight": "none"}},
            ],
        },
        "count": 4,
    },
    "heads_norms_biases_and_bases": {
        "embed": [{"kind": "token"}, {"kind": "scale", "by": "sqrt(dim)"}, {"kind": "positions"}],
        "layers": (
            {
                **ATTENTION,
                "kv_heads": 1,
                "head_dim": 6,
                "qk_norm": {"weight": "1 + w"},
                "rope": {"base": 100},
                "bias": ["q", "k", "v"],
            },
            {**MLP, "act": "gelu_tanh(gate) * x", "bias": True},
        ),
        "blocks": {
            "norm": {"kind": "rms", "weight": "1 + w", "places": ["before", "after"]},
            "changes": [{"where": "layer == 3", "attention": {"rope": {"base": 900}, "kv_heads": 2}}],
        },
        "norm": {"kind": "layer", "bias": False},
        "head": {"tied": False, "bias": True, "softcap": "z / 2"},
        "fuse": (
            {"blocks.*.attention": ["y"]},
            {"blocks.*.attention": ["q.rope"]},
            {"blocks.*.mlp": ["up", "up.biased", "gate", "gate.biased", "act", "down"]},
        ),
        "count": 4,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_equals_its_reference(case: str, tmp_path: Path) -> None:
    check_block(CASES[case], tmp_path)
