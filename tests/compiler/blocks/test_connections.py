"""Connections: residuals, skips, mixes, loops, lanes, and wiring by expressions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from block_checks import NORM_ROPE, attention, check_block
from tiny_models import ATTENTION, FUSE_MLP, MLP

LOSS = {"head": ["logits", "softcap", "loss"]}

CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "residual_learned": {"layers": ({**ATTENTION, "residual": "learned"}, {**MLP, "residual": "learned"})},
    "residual_by_layer": {
        "layers": ({**ATTENTION, "residual": "1/(layer + 1)"}, {**MLP, "residual": "exp(-layer)"}),
        "count": 3,
    },
    "unet_2": {"blocks": {"skips": {"kind": "unet"}}, "count": 2},
    "unet_5": {
        "blocks": {"skips": {"kind": "unet"}, "norm": {"kind": "rms", "scale": "1/(layer + 1)"}},
        "layers": ({**ATTENTION, "rope": {}}, {**MLP, "residual": "learned"}),
        "count": 5,
    },
    "mix_of_one_block": {"blocks": {"mix": {"kind": "embedded"}}, "count": 1},
    "mix_and_skips": {"blocks": {"mix": {"kind": "embedded"}, "skips": {"kind": "unet"}}, "count": 3},
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
    "parallel_in_one": {
        "layers": ({**ATTENTION, "residual": "learned", "rope": {}}, {**MLP, "residual": 0.5}),
        "blocks": {"parallel": [2], "norm": {"kind": "rms", "affine": True, "scale": "1/(layer + 1)"}},
        "count": 4,
    },
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
    "loop_values_without_skips": {
        "layers": ({**ATTENTION, "values": {"dim": 3, "layers": [1]}}, MLP),
        "blocks": {"loop": {"first": 1, "last": 1, "passes": 2}},
        "count": 2,
    },
    "loop_from_half": {
        "layers": ({**ATTENTION, "rope": {}}, MLP),
        "blocks": {"loop": {"first": 1, "last": 2, "passes": 2, "after": 0.5}, "skips": {"kind": "unet"}},
        "count": 4,
    },
    "loop_never": {
        "blocks": {"loop": {"first": 1, "last": 1, "passes": 2, "after": 1}, "skips": {"kind": "unet", "gated": True}},
        "count": 3,
    },
    "lanes": {
        "layers": ({**ATTENTION, "residual": "learned", "rope": {}}, {**MLP, "residual": 0.5}),
        "blocks": {"lanes": {"first": 1, "carry": 1.2}},
        "count": 3,
    },
    "lanes_of_the_last": {
        "layers": ({**ATTENTION, "residual": "1/(layer + 1)"}, {**MLP, "residual": "learned"}),
        "blocks": {"lanes": {"first": 2}, "mix": {"kind": "embedded"}, "parallel": [0]},
        "count": 3,
    },
    "lanes_and_skips": {
        "blocks": {"lanes": {"first": 3}, "skips": {"kind": "unet"}, "mix": {"kind": "embedded"}},
        "count": 5,
    },
    "lanes_that_more_skips_join_once_looped": {
        "blocks": {
            "loop": {"first": 0, "last": 0, "passes": 4, "after": 0.5},
            "lanes": {"first": 4},
            "skips": {"kind": "unet"},
        },
        "count": 6,
    },
    "lanes_behind_a_late_loop": {
        "layers": ({**ATTENTION, "rope": {}, "gate": {"features": 3}}, {**MLP, "residual": "learned"}),
        "blocks": {
            "loop": {"first": 0, "last": 1, "passes": 3, "after": 0.35},
            "lanes": {"first": 3},
            "skips": {"kind": "unet", "gated": True},
            "mix": {"kind": "embedded"},
            "norm": {"kind": "rms", "scale": "1/sqrt(layer + 1)"},
        },
        "count": 5,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_equals_its_reference(case: str, tmp_path: Path) -> None:
    check_block(CASES[case], tmp_path)
