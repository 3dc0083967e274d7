"""Embeddings and heads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from block_checks import attention, check_block

LOSS = {"head": ["logits", "softcap", "loss"]}

CASES: Mapping[str, dict[str, Any]] = {
    "project_norm": {
        "embed": [{"kind": "token", "dim": 4}, {"kind": "project"}, {"kind": "norm", "eps": 0.01}],
        "head": {"tied": False},
    },
    "embed_layer_norm": {"embed": [{"kind": "token"}, {"kind": "norm", "norm": "layer", "weight": "w", "bias": True}]},
    "embed_rms_norm_with_a_weight": {"embed": [{"kind": "token"}, {"kind": "norm", "weight": "1 + w", "eps": 0.01}]},
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
    "bigram_norm_smear": {
        "embed": [
            {"kind": "token"},
            {"kind": "bigram", "buckets": 32, "dim": 5, "scale": 0.5},
            {"kind": "norm"},
            {"kind": "smear"},
        ],
    },
    "smear_by_token": {
        "embed": [{"kind": "token"}, {"kind": "smear_by_token", "features": 3, "bos": 4}, {"kind": "norm"}],
    },
    "smear_by_token_narrow": {
        "embed": [{"kind": "token", "dim": 4}, {"kind": "smear_by_token", "features": 4}, {"kind": "project"}],
        "head": {"tied": False},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_equals_its_reference(case: str, tmp_path: Path) -> None:
    check_block(CASES[case], tmp_path)
