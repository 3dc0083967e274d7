"""Fusion points: groups of an MLP, of attention, of norms with rotary positions, and of the head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from block_checks import NORM_ROPE, attention, check_block
from tiny_models import ATTENTION, FUSE_MLP, MLP

GATED = {**MLP, "act": "silu(gate) * x"}
HEAD = {"head": ["logits", "softcap"]}
LOSS = {"head": ["logits", "softcap", "loss"]}
PLAIN_LOSS = {"head": ["logits", "loss"]}
RESIDUAL = {"blocks.*.mlp": ["up", "act", "down", "x"]}
ROPE = {"blocks.*.*.{q,k}": ["rope"]}

CASES: Mapping[str, dict[str, Any]] = {
    "rope_neighbors_fused": {
        **attention(qk_norm={"gain": 1.5}, rope={"dims": 4, "pairs": "neighbors"}, head_dim=6),
        "fuse": (*NORM_ROPE, FUSE_MLP),
    },
    "qk_norm_weight_and_rope_fused": {
        **attention(qk_norm={"weight": "w", "gain": 1.5}, rope={"dims": 2}),
        "fuse": ({"blocks.*.attention": ["q.rope", "q.gain"]}, {"blocks.*.attention": ["k.rope"]}),
    },
    "qk_norm_after_rope_fused": {**attention(qk_norm={"after_rope": True}, rope={}), "fuse": (ROPE,)},
    "prefix_fused": {
        **attention(mask="j <= i or j < prefix", rope={}),
        "prefix": 4,
        "fuse": ({"blocks.*.attention": ["y"]}, FUSE_MLP),
    },
    "softcap_fused": {"head": {"softcap": 2.5}, "fuse": (FUSE_MLP, HEAD)},
    "softcap_untied_fused": {"head": {"softcap": 3, "tied": False}, "fuse": (HEAD,)},
    "loss_untied_fused": {"head": {"softcap": 3, "tied": False}, "fuse": (LOSS,)},
    "loss_without_padding_fused": {"head": {"softcap": 2}, "fuse": (LOSS,), "vocab": 16},
    "loss_fused_alone": {"layers": (MLP,), "fuse": (PLAIN_LOSS,), "vocab": 65},
    "norm_rope_fused": {**attention(qk_norm={"gain": 1.5}, rope={"dims": 2}), "fuse": (*NORM_ROPE, FUSE_MLP)},
    "norm_rope_of_whole_heads_fused": {
        **attention(qk_norm={"gain": 1.5, "eps": 0.1}, rope={"base": 50}, kv_heads=1),
        "fuse": (*NORM_ROPE, FUSE_MLP),
        "blocks": {"skips": {"kind": "unet"}},
        "count": 3,
    },
    "norm_rope_without_gain_fused": {
        **attention(qk_norm={}, rope={"dims": 2}, window=3),
        "fuse": ({"blocks.*.attention": ["q.norm", "q.rope"]}, {"blocks.*.attention.k": ["norm", "rope"]}),
    },
    "rope_gain_fused": {
        **attention(qk_norm={"gain": 2}, rope={}),
        "fuse": ({"blocks.*.attention": ["q.rope", "q.gain"]}, {"blocks.*.attention": ["k.rope"]}),
    },
    "rope_fused": {**attention(rope={}), "fuse": (ROPE,)},
    "ropes_of_two_attentions_fused": {
        "layers": (
            {**ATTENTION, "name": "near", "window": 3, "rope": {"dims": 2}},
            {**ATTENTION, "name": "far", "rope": {"base": 50}, "kv_heads": 1},
            MLP,
        ),
        "fuse": (ROPE, FUSE_MLP),
    },
    "residual_fused": {"fuse": (RESIDUAL,)},
    "residual_number_fused": {"layers": (ATTENTION, {**MLP, "residual": 0.5}), "fuse": (RESIDUAL,)},
    "residual_gated_fused": {"layers": (ATTENTION, {**GATED, "residual": "learned"}), "fuse": (RESIDUAL,)},
    "down_residual_fused": {"fuse": ({"blocks.*.mlp": ["down", "x"]},)},
    "up_act_fused": {"fuse": ({"blocks.*.mlp": ["up", "act"]},)},
    "two_groups_of_one_part": {
        "layers": (ATTENTION, {**MLP, "residual": "learned"}),
        "fuse": ({"blocks.*.mlp": ["up", "act"]}, {"blocks.*.mlp": ["down", "x"]}),
    },
    "biases_fused": {"layers": (ATTENTION, {**MLP, "act": "gelu_tanh(x)", "bias": True})},
    "biases_of_a_gate_fused": {
        "layers": (ATTENTION, {**GATED, "bias": True, "residual": "learned"}),
        "fuse": ({"blocks.*.mlp": ["up", "act", "down", "down.biased", "x"]},),
    },
    "values_with_names_of_saved_values_fused": {
        "layers": (
            ATTENTION,
            {**MLP, "bias": True, "write": "x + (pre_branch + slope) * y + d"}
            | {"learn": {name: {"init": 0.5} for name in ("pre_branch", "slope", "d")}},
        ),
        "fuse": ({"blocks.*.mlp": ["up", "act", "down", "down.biased", "x"]},),
    },
    "a_layer_with_the_name_of_a_saved_value_fused": {
        "layers": (ATTENTION, {**GATED, "name": "slope"}),
        "fuse": ({"blocks.*.slope": ["up", "act", "down", "x"]},),
    },
    "sums_of_one_name_fused": {
        "layers": (
            {**ATTENTION, "bias": True, "write": "x + 0.5 * y"},
            {**GATED, "bias": True, "write": "x + g * y", "learn": {"g": {"of": "x", "shape": "dim"}}},
        ),
        "fuse": (
            {"blocks.*.attention": ["out", "out.biased", "x"]},
            {"blocks.*.mlp": ["up", "act", "down", "down.biased", "x"]},
        ),
    },
    "act_down_fused": {"fuse": ({"blocks.*.mlp": ["act", "down"]},)},
    "attention_out_fused": {
        "layers": ({**ATTENTION, "residual": "learned"}, MLP),
        "fuse": ({"blocks.*.attention": ["out", "x"]}, FUSE_MLP),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_equals_its_reference(case: str, tmp_path: Path) -> None:
    check_block(CASES[case], tmp_path)
