"""Cases of test_blocks.py: blocks and connections of the later parameter-golf records."""

from collections.abc import Mapping
from typing import Any

from tiny_models import ATTENTION, MLP

CASES: Mapping[str, dict[str, Any]] = {
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
    "documents": {"layers": ({**ATTENTION, "bos": 4}, MLP)},
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
