"""Every kind of block, with each option that changes what it computes: generated code against float64 references."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from late_blocks import CASES as LATE
from tiny_models import ATTENTION, FUSE_MLP, MLP, Pair, float64, pair, tiny

from specc.compiler import blocks
from specc.compiler.blocks.parts import Embed, Layer, Norm
from specc.compiler.catalog import models
from specc.compiler.programs import fx_witness as witness
from specc.compiler.programs.programs import flatten
from specc.compiler.strict import tag_of

ROOT = Path(__file__).parents[3]
GATED = {**MLP, "act": "silu(gate) * x"}
CLASHING = ("block", "model", "weights", "linear_relu2", "x", "h", "cos", "f", "tensor", "positions", "blocks", "act")
HEAD = {"head": ["logits", "softcap"]}
LOSS = {"head": ["logits", "softcap", "loss"]}
PLAIN_LOSS = {"head": ["logits", "loss"]}
RESIDUAL = {"blocks.*.mlp": ["up", "act", "down", "x"]}
NORM_ROPE = ({"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]}, {"blocks.*.attention": ["k.norm", "k.rope"]})
ROPE = {"blocks.*.*.{q,k}": ["rope"]}
LLAMA3 = {"kind": "llama3", "factor": 2.5, "trained": 300, "low": 0.5, "high": 30}
YARN = {"kind": "yarn", "factor": 4, "trained": 40, "low": 0.25, "high": 3}


def attention(**options: Any) -> dict[str, Any]:
    return {"layers": ({**ATTENTION, **options}, MLP)}


def mlp(act: Any = MLP["act"], **options: Any) -> dict[str, Any]:
    return {"layers": (ATTENTION, {**MLP, "act": act, **options})}


def norm(**options: Any) -> dict[str, Any]:
    return {"norm": options, "blocks": {"norm": options}}


CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "one_block": {"count": 1},
    "window": attention(window=3),
    "window_of_one": {**attention(window=1), "name": "blind"},  # a token that sees itself alone reads no q and k
    "window_beyond_context": attention(window=100),
    "rope": attention(rope={}),
    "rope_partial": attention(rope={"dims": 2, "base": 100}),
    "rope_wide_heads": attention(rope={"base": 500}, head_dim=6),
    "rope_linear": attention(rope={"scaling": "f / 3"}),
    "rope_half_of_the_pairs": attention(rope={"scaling": "where(pair < 1, f, 0)", "pairs": "neighbors"}),
    "rope_llama3": attention(rope={"scaling": LLAMA3, "turn": "backward"}, head_dim=6),
    "rope_yarn": attention(rope={"base": 30, "scaling": YARN}, head_dim=12),
    "rope_yarn_between_pairs": attention(
        rope={"base": 30, "scaling": {**YARN, "whole": False, "magnitude": 1.5}, "turn": "backward", "dims": 8},
        head_dim=10,
    ),
    "rope_forward": attention(rope={"turn": "backward"}),
    "rope_neighbors": attention(rope={"pairs": "neighbors"}, head_dim=6),
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
    "rope_neighbors_fused": {
        **attention(qk_norm={"gain": 1.5}, rope={"dims": 4, "pairs": "neighbors"}, head_dim=6),
        "fuse": (*NORM_ROPE, FUSE_MLP),
    },
    "qk_norm": attention(qk_norm={}),
    "qk_norm_gain": attention(qk_norm={"gain": 1.5}, rope={"dims": 2}),
    "qk_norm_weight": attention(qk_norm={"weight": "w"}, rope={}, kv_heads=1),
    "qk_norm_one_plus_weight": attention(qk_norm={"weight": "1 + w", "gain": 2}, head_dim=6),
    "qk_norm_over_all_heads": attention(qk_norm={"weight": "w", "over": "all"}, rope={}, kv_heads=1),
    "qk_norm_after_rope": attention(qk_norm={"weight": "w", "after_rope": True}, rope={}),
    "qk_norm_layer": attention(qk_norm={"kind": "layer", "weight": "w"}, rope={"dims": 2}, bias=["q", "k", "v"]),
    "qk_norm_layer_without_weight": attention(qk_norm={"kind": "layer", "eps": 0.01}),
    "qk_norm_weight_and_rope_fused": {
        **attention(qk_norm={"weight": "w", "gain": 1.5}, rope={"dims": 2}),
        "fuse": ({"blocks.*.attention": ["q.rope", "q.gain"]}, {"blocks.*.attention": ["k.rope"]}),
    },
    "qk_norm_after_rope_fused": {**attention(qk_norm={"after_rope": True}, rope={}), "fuse": (ROPE,)},
    "kv_heads": attention(kv_heads=1, rope={}),
    "kv_heads_window": attention(kv_heads=1, window=4, rope={"dims": 2}, qk_norm={"gain": 2}),
    "head_dim": attention(head_dim=3),
    "residual_learned": {"layers": ({**ATTENTION, "residual": "learned"}, {**MLP, "residual": "learned"})},
    "residual_number": {"layers": ({**ATTENTION, "residual": 0.5}, {**MLP, "residual": 0.25})},
    "residual_formula": {"layers": ({**ATTENTION, "residual": "1/sqrt(2 * layers)"}, MLP)},
    "residual_by_layer": {
        "layers": ({**ATTENTION, "residual": "1/(layer + 1)"}, {**MLP, "residual": "exp(-layer)"}),
        "count": 3,
    },
    "rms_affine": norm(kind="rms", affine=True),
    "rms_one_plus_weight": norm(kind="rms", weight="1 + w"),
    "norms_before_and_behind": {
        "blocks": {"norm": {"kind": "rms", "weight": "1 + w", "places": ["before", "after"]}},
        "norm": {"kind": "rms", "weight": "1 + w"},
    },
    "norms_after": {"blocks": {"norm": {"kind": "rms", "weight": "w", "places": ["after"]}}},
    "norms_after_scaled": {
        "blocks": {"norm": {"kind": "layer", "places": ["after"], "scale": "1/(layer + 1)"}},
        "layers": ({**ATTENTION, "residual": "learned"}, {**MLP, "residual": 0.5}),
    },
    "layer_norm_without_bias": norm(kind="layer", bias=False),
    "layer_norm_without_weight": norm(kind="layer", weight="none", bias=False),
    "layer_norm_with_bias_alone": norm(kind="layer", weight="none"),
    "layer_norm_of_one_plus_weight": norm(kind="layer", weight="1 + w"),
    "parallel_norms": {"blocks": {"write": "x + attention + mlp", "norm": {"kind": "layer"}}},
    "parallel_with_one_norm": {"blocks": {"write": "x + attention + mlp", "norm": {"kind": "layer", "shared": True}}},
    "biases": {
        "layers": ({**ATTENTION, "bias": True}, {**MLP, "bias": True}),
        "head": {"tied": False, "bias": True, "softcap": 3},
    },
    "biases_of_some": {"layers": ({**ATTENTION, "bias": ["q", "k", "v"]}, {**GATED, "bias": ["gate", "down"]})},
    "biases_fused": {
        "layers": (ATTENTION, {**MLP, "bias": True}),
        "fuse": ({"blocks.*.mlp": ["up", "up.biased", "act", "down", "down.biased"]},),
    },
    "biases_of_gates_fused": {
        "layers": (ATTENTION, {**GATED, "bias": ["up", "gate"]}),
        "fuse": ({"blocks.*.mlp": ["up", "up.biased", "gate", "gate.biased", "act", "down"]},),
    },
    "rms_eps": norm(kind="rms", eps=0.1),
    "rms_scale": norm(kind="rms", scale=0.5),
    "rms_scale_by_layers": norm(kind="rms", affine=True, scale="1/sqrt(layers)"),
    "rms_scale_by_layer": {"blocks": {"norm": {"kind": "rms", "scale": "1/sqrt(layer + 1)"}}, "count": 3},
    "layer_norm": norm(kind="layer"),
    "layer_norm_scaled": {"blocks": {"norm": {"kind": "layer", "scale": "1/(layer + 2)"}}},
    "project": {"embed": [{"kind": "token", "dim": 4}, {"kind": "project"}], "head": {"tied": False}},
    "project_norm": {
        "embed": [{"kind": "token", "dim": 4}, {"kind": "project"}, {"kind": "norm", "eps": 0.01}],
        "head": {"tied": False},
    },
    "embed_norm": {"embed": [{"kind": "token"}, {"kind": "norm"}]},
    "embed_scale": {"embed": [{"kind": "token"}, {"kind": "scale", "by": "sqrt(dim)"}]},
    "embed_scale_number": {
        "embed": [{"kind": "token", "dim": 4}, {"kind": "scale", "by": 0.5}, {"kind": "project"}],
        "head": {"tied": False},
    },
    "learned_positions": {
        "embed": [{"kind": "token"}, {"kind": "positions"}, {"kind": "norm"}],
        **attention(rope={}, bias=True),
    },
    "learned_positions_and_bigram": {
        "embed": [
            {"kind": "token"},
            {"kind": "bigram", "buckets": 16, "dim": 3},
            {"kind": "positions", "init": {"normal": 0.5}},
        ],
    },
    "logit_scale": {"head": {"softcap": "z / 8"}, "fuse": (LOSS,)},
    "softcap_expression": {"head": {"softcap": "3 * sigmoid(z / 2)", "tied": False, "bias": True}},
    "untied": {"head": {"tied": False}},
    "softcap": {"head": {"softcap": 2}},
    "softcap_fused": {"head": {"softcap": 2.5}, "fuse": (FUSE_MLP, HEAD)},
    "softcap_untied_fused": {"head": {"softcap": 3, "tied": False}, "fuse": (HEAD,)},
    "loss_fused": {"fuse": (FUSE_MLP, PLAIN_LOSS)},
    "loss_softcap_fused": {"head": {"softcap": 2.5}, "fuse": (FUSE_MLP, LOSS)},
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
    "unet_2": {"blocks": {"skips": {"kind": "unet"}}, "count": 2},
    "unet_3": {"blocks": {"skips": {"kind": "unet"}}, "count": 3},
    "unet_5": {
        "blocks": {"skips": {"kind": "unet"}, "norm": {"kind": "rms", "scale": "1/(layer + 1)"}},
        "layers": ({**ATTENTION, "rope": {}}, {**MLP, "residual": "learned"}),
        "count": 5,
    },
    "unet_gated": {"blocks": {"skips": {"kind": "unet", "gated": True}}, "count": 3},
    "mix": {"blocks": {"mix": {"kind": "embedded"}}},
    "mix_of_one_block": {"blocks": {"mix": {"kind": "embedded"}}, "count": 1},
    "mix_and_skips": {"blocks": {"mix": {"kind": "embedded"}, "skips": {"kind": "unet"}}, "count": 3},
    "rope_trained": attention(rope={"trained": 3}),
    "values": attention(values={"dim": 3}),
    "values_of_all_layers_listed": attention(values={"dim": 3, "layers": [0, 1]}, rope={}),
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
    "exclude": attention(exclude={}),
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
    "a_block_without_attention": {
        **attention(rope={}, learn={"share": {"init": 1}}, write="x + share * y"),
        "blocks": {"changes": ({"where": "layer == 1", "attention": None, "read": "x + output(0)"},)},
        "count": 3,
    },
    "coefficients_by_a_network_of_the_stream": {
        "blocks": {
            "learn": {
                "inner": {"of": "x", "shape": 6},
                "a": {"of": "gelu(inner)", "shape": 1},
                "b": {"of": "gelu(inner)", "shape": 1},
                "bias": {"shape": 1, "init": 1},
            },
            "read": "(a + bias) * x + b * x0",
        },
        "count": 2,
    },
    "gated_mlp_branch": {
        "layers": (ATTENTION, {**MLP, "learn": {"open": {"of": "y"}}, "write": "x + sigmoid(open) * y"}),
    },
    "gate": attention(gate={"features": 3}),
    "gate_of_all_features": attention(gate={"act": "sigmoid(x)", "init": {"normal": 0.005}}),
    "gate_sparse": attention(gate={"features": 4, "act": "sigmoid(0.5 * x)"}, exclude={}, kv_heads=1),
    "parallel": {"blocks": {"parallel": [0, 1]}},
    "parallel_in_one": {
        "layers": ({**ATTENTION, "residual": "learned", "rope": {}}, {**MLP, "residual": 0.5}),
        "blocks": {"parallel": [2], "norm": {"kind": "rms", "affine": True, "scale": "1/(layer + 1)"}},
        "count": 4,
    },
    "loop": {"blocks": {"loop": {"first": 0, "last": 0, "passes": 2}}, "count": 1},
    "loop_of_two": {
        "layers": ({**ATTENTION, "rope": {}}, {**MLP, "residual": "1/(layer + 1)"}),
        "blocks": {"loop": {"first": 1, "last": 2, "passes": 3}},
        "count": 4,
    },
    "loop_and_skips": {
        **attention(rope={}, kv_heads=1),
        "blocks": {"loop": {"first": 1, "last": 1, "passes": 3}, "skips": {"kind": "unet"}},
        "count": 3,
    },
    "loop_with_all": {
        **attention(rope={}, values={"dim": 3, "layers": [1, 3]}, exclude={"layers": [2, 3]}),
        "blocks": {
            "loop": {"first": 1, "last": 2, "passes": 2},
            "skips": {"kind": "unet", "gated": True},
            "mix": {"kind": "embedded"},
            "parallel": [2, 3],
        },
        "embed": [{"kind": "token"}, {"kind": "norm"}, {"kind": "smear"}],
        "count": 4,
    },
    "bigram": {"embed": [{"kind": "token"}, {"kind": "bigram", "buckets": 16, "dim": 3, "bos": 4}]},
    "bigram_norm_smear": {
        "embed": [
            {"kind": "token"},
            {"kind": "bigram", "buckets": 32, "dim": 5, "scale": 0.5},
            {"kind": "norm"},
            {"kind": "smear"},
        ],
    },
    "smear_bos": {"embed": [{"kind": "token"}, {"kind": "norm"}, {"kind": "smear", "bos": 4}]},
    "smear_by_token": {
        "embed": [{"kind": "token"}, {"kind": "smear_by_token", "features": 3, "bos": 4}, {"kind": "norm"}],
    },
    "smear_by_token_narrow": {
        "embed": [{"kind": "token", "dim": 4}, {"kind": "smear_by_token", "features": 4}, {"kind": "project"}],
        "head": {"tied": False},
    },
    "everything": {
        "embed": [
            {"kind": "token"},
            {"kind": "bigram", "buckets": 32, "dim": 5},
            {"kind": "norm"},
            {"kind": "smear", "bos": 4},
        ],
        "layers": (
            {
                **ATTENTION,
                "kv_heads": 1,
                "rope": {"dims": 4, "trained": 6},
                "qk_norm": {"gain": 1.5},
                "values": {"dim": 3, "layers": [3, 4]},
                "exclude": {},
                "gate": {"features": 3},
                "residual": "learned",
            },
            {**MLP, "residual": "learned"},
        ),
        "blocks": {
            "norm": {"kind": "rms", "scale": "1/sqrt(layer + 1)"},
            "skips": {"kind": "unet", "gated": True},
            "mix": {"kind": "embedded"},
            "parallel": [4],
        },
        "head": {"softcap": 2.5},
        "count": 5,
        "fuse": (*NORM_ROPE, FUSE_MLP, LOSS),
    },
    "two_mlps": {
        "layers": (ATTENTION, {**MLP, "name": "wide", "hidden": 16}, {**MLP, "name": "deep", "act": "gelu(x)"}),
        "fuse": ({"blocks.*.wide": ["up", "act", "down"]}, {"blocks.*.deep": ["up", "act", "down"]}),
    },
    "two_mlps_of_one_kind": {
        "layers": (ATTENTION, {**MLP, "name": "a"}, {**MLP, "name": "b"}),
        "fuse": ({"blocks.*.{a,b}": ["up", "act", "down"]},),
    },
    "two_attentions": {
        "layers": (
            {**ATTENTION, "name": "near", "window": 3, "rope": {"dims": 2}},
            {**ATTENTION, "name": "far", "rope": {"base": 50}, "kv_heads": 1},
            MLP,
        ),
    },
    "ropes_of_two_bases": {
        "layers": (
            {**ATTENTION, "name": "near", "rope": {"base": 3}},
            {**ATTENTION, "name": "far", "rope": {"base": 50.5}},
            MLP,
        ),
    },
    "names_of_the_generated_code": {
        "layers": (
            {**ATTENTION, "name": "attend", "rope": {}},
            *({**MLP, "name": name, "hidden": 9 + i} for i, name in enumerate(CLASHING)),
        ),
        "fuse": tuple({f"blocks.*.{name}": ["up", "act", "down"]} for name in CLASHING),
    },
    "only_attention": {"layers": (ATTENTION,), "fuse": ()},
    "only_mlp": {"layers": (MLP,)},
    "mlp_ratio": {"layers": (ATTENTION, {"kind": "mlp", "ratio": 3.5, "act": "leaky_relu(x, 0.5) ** 2"})},
    "leaky_relu2": mlp("leaky_relu(x, 0.5) ** 2"),
    "gelu": mlp("gelu(x)"),
    "gelu_tanh": mlp("gelu_tanh(x)"),
    "silu": mlp("silu(x)"),
    "linear": mlp("2 * x"),
    "odd_activation": mlp("where(x > 0.5, tanh(x) * x, abs(x) - 0.25)"),
    "named_activation": mlp({"expr": "exp(-x ** 2)", "name": "bump"}),
    "swiglu": {"layers": (ATTENTION, GATED)},
    "geglu": mlp("gelu(gate) * x"),
    "bilinear": mlp("gate * x"),
    "residual_fused": {"fuse": (RESIDUAL,)},
    "residual_learned_fused": {"layers": (ATTENTION, {**MLP, "residual": "learned"}), "fuse": (RESIDUAL,)},
    "residual_number_fused": {"layers": (ATTENTION, {**MLP, "residual": 0.5}), "fuse": (RESIDUAL,)},
    "residual_gated_fused": {"layers": (ATTENTION, {**GATED, "residual": "learned"}), "fuse": (RESIDUAL,)},
    "down_residual_fused": {"fuse": ({"blocks.*.mlp": ["down", "x"]},)},
    "up_act_fused": {"fuse": ({"blocks.*.mlp": ["up", "act"]},)},
    "two_groups_of_one_part": {
        "layers": (ATTENTION, {**MLP, "residual": "learned"}),
        "fuse": ({"blocks.*.mlp": ["up", "act"]}, {"blocks.*.mlp": ["down", "x"]}),
    },
    "act_down_fused": {"fuse": ({"blocks.*.mlp": ["act", "down"]},)},
    "attention_out_fused": {
        "layers": ({**ATTENTION, "residual": "learned"}, MLP),
        "fuse": ({"blocks.*.attention": ["out", "x"]}, FUSE_MLP),
    },
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
    "bases_by_layer": {
        "layers": ({**ATTENTION, "rope": {"base": 30}, "qk_norm": {"weight": "1 + w"}}, MLP),
        "blocks": {"changes": [{"where": "layer % 3 == 2", "attention": {"rope": {"base": 900}}}]},
        "count": 4,
    },
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
    "attention_in_some_layers": {
        "blocks": {"changes": [{"where": "layer == 1", "attention": MLP}]},
        "fuse": ({"blocks.*.mlp": ["up", "act", "down"]},),
        "count": 3,
    },
    "attention_beside_another_in_some_layers": {
        "layers": ({**ATTENTION, "name": "near", "window": 3}, {**ATTENTION, "name": "far", "kv_heads": 1}, MLP),
        "blocks": {"changes": [{"where": "layer == 1", "far": {**MLP, "hidden": 9}}]},
    },
    **LATE,
}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    """A case as it is fused, and with `fuse: []`, with equal parameters."""
    spec = tiny(**CASES[request.param])
    folder: Path = tmp_path_factory.mktemp(request.param)
    return pair(spec, folder, fuse=True), pair(spec, folder, fuse=False)


def test_loss_and_all_gradients_equal_the_reference(both: tuple[Pair, Pair]) -> None:
    with float64():
        for made in both:
            ids, targets = made.batch()
            want = made.reference("train", ids=ids, targets=targets)["loss"]
            gradients = torch.autograd.grad(want, list(made.params.values()))
            loss = made.model(ids, targets)
            loss.backward()
            torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11)
            for (name, parameter), gradient in zip(
                made.model.named_parameters(), _ordered(made, gradients), strict=True
            ):
                blind = made.spec.name == "blind" and name.endswith((".q", ".k"))
                assert (gradient.abs().max() > 0) != blind, f"the gradient of {name} tests nothing"
                torch.testing.assert_close(
                    parameter.grad, gradient, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
                )


def _ordered(made: Pair, gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    by_name = dict(zip(made.params, gradients, strict=True))
    return [by_name[name] for name, _ in made.model.named_parameters()]


def test_scores_are_causal_and_equal_the_reference(both: tuple[Pair, Pair]) -> None:
    with float64(), torch.no_grad():
        for made in both:
            ids, targets = made.batch()
            scores = made.model.score(ids, targets)
            want = made.reference("score", ids=ids, targets=targets)["loss"]
            torch.testing.assert_close(scores, want, rtol=1e-11, atol=1e-11)
            changed = ids.clone()
            changed[:, 5] = (changed[:, 5] + 1) % made.spec.model.vocabulary
            moved = (made.model.score(changed, targets) - scores).abs()
            assert moved[:, :5].max() == 0
            assert moved[:, 5].min() > 0


def test_cached_logits_equal_the_uncached(both: tuple[Pair, Pair]) -> None:
    with float64(), torch.no_grad():
        for made in both:
            ids, _ = made.batch()
            rows, tokens = ids.shape
            cache = made.model.new_cache(rows, tokens + 3)
            for state in cache:
                for tensor in state:
                    tensor.fill_(1e6)  # rows that are not written yet must not be read
            logits = [made.model.prefill(ids[:, :5], torch.tensor(0), cache)]
            logits.append(made.model.prefill(ids[:, 5:8], torch.tensor(5), cache))
            logits += [made.model.decode(ids[:, i : i + 1], torch.tensor(i), cache) for i in range(8, tokens)]
            found = torch.stack([row.log_softmax(-1) for row in logits], dim=1)
            ends = torch.tensor([4, 7, *range(8, tokens)])
            for token in range(made.spec.model.vocabulary):
                nats = made.model.score(ids, torch.full_like(ids, token))[:, ends]
                torch.testing.assert_close(-found[..., token], nats, rtol=1e-9, atol=1e-10)


def test_torch_fx_finds_the_plan(both: tuple[Pair, Pair]) -> None:
    for made in both:
        source = sys.modules[type(made.model).__module__]
        early = [(name, name) for phase in made.programs.phases for name in (phase.train, phase.score)]
        for program, method in (("train", "forward"), ("score", "score"), *early):
            traced = witness.trace(made.model, source, method)
            nodes = flatten(made.programs, made.programs.program(program), groups=False).nodes
            assert witness.round_trip(made.programs, program, traced) == len(nodes)


def test_generated_code_is_ruff_clean(both: tuple[Pair, Pair]) -> None:
    for made in both:
        folder = Path(str(sys.modules[type(made.model).__module__].__file__)).parent
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                "check",
                "--no-cache",
                "--config",
                str(ROOT / "pyproject.toml"),
                str(folder),
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_every_kind_of_block_is_in_a_case() -> None:
    wanted = {tag_of(model, "kind") for role in (Embed, Layer, Norm) for model in models(blocks, role, "kind")}
    used: set[object] = {"rms"}  # the default

    def collect(value: object) -> None:
        if isinstance(value, Mapping):
            used.add(value.get("kind"))
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(list(CASES.values()))
    collect([ATTENTION, MLP, {"kind": "token"}])
    assert wanted <= used
