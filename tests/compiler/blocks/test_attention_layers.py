"""Layers of attention: masks, rotary positions, norms of queries and keys, values, gates, latent attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from block_checks import attention, check_block
from tiny_models import ATTENTION, MLP

LLAMA3 = {"kind": "llama3", "factor": 2.5, "trained": 300, "low": 0.5, "high": 30}
YARN = {"kind": "yarn", "factor": 4, "trained": 40, "low": 0.25, "high": 3}
LATENT: dict[str, Any] = {"kind": "latent", "heads": 2, "kv_rank": 5, "rope_dim": 4}
FUSED_LATENT: dict[str, Any] = {"fuse": ({"blocks.*.latent": ["y"]},)}

CASES: Mapping[str, dict[str, Any]] = {
    "window": attention(window=3),
    "window_of_one": {**attention(window=1), "name": "blind"},  # a token that sees itself alone reads no q and k
    "window_beyond_context": attention(window=100),
    "rope_half_of_the_pairs": attention(rope={"scaling": "where(pair < 1, f, 0)", "pairs": "neighbors"}),
    "rope_llama3": attention(rope={"scaling": LLAMA3, "turn": "backward"}, head_dim=6),
    "rope_yarn": attention(rope={"base": 30, "scaling": YARN}, head_dim=12),
    "rope_yarn_between_pairs": attention(
        rope={"base": 30, "scaling": {**YARN, "whole": False, "magnitude": 1.5}, "turn": "backward", "dims": 8},
        head_dim=10,
    ),
    "rope_by_layer": {
        **attention(rope={"base": 50}),
        "blocks": {
            "changes": (
                {"where": "layer == 1", "attention": {"rope": {"base": 500, "scaling": "f / 2"}}},
                {"where": "layer == 2", "attention": {"rope": None}},
            )
        },
        "count": 3,
    },
    "qk_norm_gain": attention(qk_norm={"gain": 1.5}, rope={"dims": 2}),
    "qk_norm_over_all_heads": attention(qk_norm={"weight": "w", "over": "all"}, rope={}, kv_heads=1),
    "qk_norm_layer_without_weight": attention(qk_norm={"kind": "layer", "eps": 0.01}),
    "qk_norm_bias": attention(qk_norm={"kind": "layer", "weight": "w", "bias": True}, rope={}, kv_heads=1),
    "qk_norm_rms_bias_after_rope": attention(qk_norm={"bias": True, "after_rope": True}, rope={"dims": 2}),
    "qk_norm_weights_of_each_head": attention(
        kv_heads=1,
        head_dim=6,
        rope={},
        qk_norm={"kind": "layer"},
        q="q * a + c",
        k="k * b",
        learn={
            "a": {"shape": "heads * head_dim", "init": 1},
            "b": {"shape": "values", "init": 1},
            "c": {"shape": "heads * head_dim", "init": 0},
        },
    ),
    "clipped_qkv": attention(
        rope={}, q="min(max(q, -0.1), 0.1)", k="min(max(k, -0.1), 0.1)", v="min(max(v, -0.1), 0.1)", kv_heads=1
    ),
    "queries_gated_by_the_input": attention(learn={"open": {"of": "h", "shape": "heads"}}, q="q * sigmoid(open)"),
    "kv_heads_window": attention(kv_heads=1, window=4, rope={"dims": 2}, qk_norm={"gain": 2}),
    "head_dim": attention(head_dim=3),
    "score_of_functions_and_fractions": attention(
        score="s + max(0.72, log(i + 1)) * relu(bias[h]) + min(0.5, j / 3) * s + s * where(j % 2 == 0, 0.2, 0.9)",
        learn={"bias": {"shape": ["heads"], "init": 0}},
    ),
    "score_of_the_logarithm_of_a_distance": attention(
        score="s - bias[h] * log(i - j + 1) + tanh(bias[0])", learn={"bias": {"shape": ["heads"], "init": 0}}
    ),
    "mask_across_documents": attention(mask="j <= i and (i - j < 2 or document(i) != document(j))", bos=1),
    "prefix_and_window": {
        **attention(mask="j <= i and i - j < 3 or j < prefix", kv_heads=1, rope={"dims": 2}),
        "prefix": 5,
    },
    "rope_trained": attention(rope={"trained": 3}),
    "values": attention(values={"dim": 3}),
    "values_in_one": attention(values={"dim": 3, "layers": [1]}, kv_heads=1, rope={}),
    "values_in_two_with_skips": {
        **attention(values={"dim": 3, "layers": [3, 4]}),
        "blocks": {"skips": {"kind": "unet"}},
        "count": 5,
    },
    "values_before_skips": {
        **attention(values={"dim": 3, "layers": [0, 2]}),
        "blocks": {"skips": {"kind": "unet"}},
        "count": 3,
    },
    "values_of_two_attentions": {
        "layers": (
            {**ATTENTION, "name": "near", "window": 3, "values": {"dim": 2, "layers": [1]}},
            {**ATTENTION, "name": "far", "kv_heads": 1, "values": {"dim": 3, "layers": [0]}},
            MLP,
        ),
    },
    "exclude_groups": attention(exclude={}, kv_heads=1, rope={}, window=4),
    "exclude_in_some": {**attention(exclude={"layers": [1, 2]}), "count": 4},
    "value_embedding_of_each_layer": {
        **attention(
            kv_heads=1,
            learn={"table": {"of": "ids", "shape": 4}, "open": {"of": "h", "features": 3, "shape": 1, "init": 0}},
            v="v + 3 * sigmoid(open) * table",
        ),
        "blocks": {
            "changes": ({"where": "layer == 1", "attention": {"learn": {"table": None, "open": None}, "v": None}},)
        },
        "count": 3,
    },
    "value_residual": {
        **attention(rope={}),
        "blocks": {
            "common": {"first": {"of": "x0"}},
            "changes": (
                {"where": "layer == 0", "attention": {"v": "first"}},
                {
                    "where": "layer > 0",
                    "attention": {
                        "learn": {"share": {"shape": 1, "init": 0.5}},
                        "v": "share * v + (1 - share) * first",
                    },
                },
            ),
        },
        "count": 3,
    },
    "gated_skip_and_backout": {
        "blocks": {
            "common": {"open": {"of": "x0", "features": 5, "shape": 1}, "out": {"shape": 1, "init": 0.2}},
            "changes": (
                {"where": "layer == 2", "read": "x + 2 * sigmoid(open) * output(0)"},
                {"where": "layer == 3", "mlp": {"write": "x + y - out * output(1)"}},
            ),
        },
        "count": 4,
    },
    "gates_of_two_values": {
        **attention(
            learn={
                "table": {"of": "ids"},
                "by_value": {"of": "table", "features": 2, "shape": 2},
                "by_input": {"of": "h", "features": 2, "shape": 2},
            },
            y="y * 2 * sigmoid(by_value + by_input)",
            v="v + table",
        ),
    },
    "numbers_of_each_head_and_channel": attention(
        learn={"gain": {"shape": 2, "init": 1}, "channels": {"shape": 8, "init": 1}}, y="gain * channels * y"
    ),
    "gated_mlp_branch": {
        "layers": (ATTENTION, {**MLP, "learn": {"open": {"of": "y"}}, "write": "x + sigmoid(open) * y"}),
    },
    "gate_of_all_features": attention(gate={"act": "sigmoid(x)", "init": {"normal": 0.005}}),
    "gate_sparse": attention(gate={"features": 4, "act": "sigmoid(0.5 * x)"}, exclude={}, kv_heads=1),
    "ropes_of_two_bases": {
        "layers": (
            {**ATTENTION, "name": "near", "rope": {"base": 3}},
            {**ATTENTION, "name": "far", "rope": {"base": 50.5}},
            MLP,
        ),
    },
    "only_attention": {"layers": (ATTENTION,), "fuse": ()},
    "heads_by_layer": {
        "layers": ({**ATTENTION, "rope": {}}, MLP),
        "blocks": {"changes": [{"where": "layer % 2 == 1", "attention": {"kv_heads": 1, "head_dim": 2}}]},
        "count": 4,
    },
    "kv_heads_by_layer": {
        "layers": ({**ATTENTION, "rope": {}, "values": {"dim": 3, "layers": [1]}}, MLP),
        "blocks": {"changes": [{"where": "layer == 0", "attention": {"kv_heads": 1}}], "order": "0..1 0..1 2"},
        "embed": [{"kind": "token"}, {"kind": "smear"}],
        "count": 3,
    },
    "earlier_values_in_a_later_order": {
        "layers": (ATTENTION, MLP),
        "blocks": {
            "changes": [{"where": "layer == 1", "attention": {"v": "v + value(0)"}}],
            "order": {"at": [[0, "0..1"], [0.35, "0..1 1..1"]]},
        },
    },
    "bases_by_layer": {
        "layers": ({**ATTENTION, "rope": {"base": 30}, "qk_norm": {"weight": "1 + w"}}, MLP),
        "blocks": {"changes": [{"where": "layer % 3 == 2", "attention": {"rope": {"base": 900}}}]},
        "count": 4,
    },
    "attention_in_some_layers": {
        "blocks": {"changes": [{"where": "layer == 1", "attention": MLP}]},
        "fuse": ({"blocks.*.mlp": ["up", "act", "down"]},),
        "count": 3,
    },
    "attention_beside_another_in_some_layers": {
        "layers": ({**ATTENTION, "name": "near", "window": 3}, {**ATTENTION, "name": "far", "kv_heads": 1}, MLP),
        "blocks": {"changes": [{"where": "layer == 1", "far": {**MLP, "hidden": 9}}]},
    },
    "latent": {"layers": (LATENT, MLP)},
    "latent_fused": {"layers": ({**LATENT, "rope": {"pairs": "neighbors"}}, MLP), **FUSED_LATENT},
    "latent_of_queries": {
        "layers": ({**LATENT, "q_rank": 3, "head_dim": 6, "v_dim": 2, "bias": True}, MLP),
        **FUSED_LATENT,
    },
    "latent_without_norms": {
        "layers": ({**LATENT, "norm": None, "scale": 0.3, "rope": {"dims": 2}, "y": "y * 2"}, MLP),
    },
    "latent_in_a_window": {
        "layers": ({**LATENT, "mask": "j <= i and i - j < 3", "score": "s - slope(h) * (i - j)", "sinks": True}, MLP),
        **FUSED_LATENT,
    },
    "latent_of_documents": {
        "layers": (
            {**LATENT, "mask": "j <= i and document(i) == document(j)", "bos": 4, "scale": "1 / (layer + 2)"},
            MLP,
        ),
    },
    "documents_in_a_window": {"layers": ({**ATTENTION, "bos": 4, "window": 3, "kv_heads": 1, "rope": {}}, MLP)},
    "documents_of_one_attention_of_two": {
        "layers": ({**ATTENTION, "name": "near", "bos": 4}, {**ATTENTION, "name": "far", "rope": {"dims": 2}}, MLP)
    },
    "documents_and_embeddings": {
        "layers": ({**ATTENTION, "bos": 4, "qk_norm": {"gain": 1.5}, "rope": {}, "exclude": {}}, MLP),
        "embed": [
            {"kind": "token"},
            {"kind": "bigram", "buckets": 16, "dim": 3, "bos": 4},
            {"kind": "norm"},
            {"kind": "smear", "bos": 4},
        ],
        "blocks": {"loop": {"first": 1, "last": 1, "passes": 2}, "lanes": {"first": 3}},
        "count": 4,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_equals_its_reference(case: str, tmp_path: Path) -> None:
    check_block(CASES[case], tmp_path)
