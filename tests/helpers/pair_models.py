"""Small models of pairs for tests: specs from a few words, modules in float64, batches with pads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tiny_models import version_2
from torch import Tensor

from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec

EMBED: dict[str, Any] = {"kind": "embed", "dim": 8}
LSTM: dict[str, Any] = {"kind": "lstm", "hidden": 8}
BOTH: dict[str, Any] = {"kind": "lstm", "hidden": 4, "directions": "both"}
SELF: dict[str, Any] = {"kind": "attention", "heads": 2}
CROSS: dict[str, Any] = {"kind": "attention", "name": "cross", "of": "encoder", "heads": 2}
MLP: dict[str, Any] = {"kind": "mlp", "hidden": 12, "act": "gelu(x)"}
CHARS = "()*+-0123456789achijknostxyz"
TRAIN: dict[str, Any] = {
    "data": {"kind": "polynomial", "lines": 100},
    "batch": 2,
    "steps": 2,
    "optimizers": [{"kind": "adamw", "match": "*", "lr": 0.01}],
}


def blocks(*layers: Mapping[str, Any], **words: Any) -> dict[str, Any]:
    return {"kind": "blocks", "count": 2, "layers": list(layers), **words}


def pairs_data(
    encoder: Sequence[Mapping[str, Any]],
    decoder: Sequence[Mapping[str, Any]],
    fuse: Sequence[Mapping[str, Any]] = (),
    name: str = "tiny",
    **model: Any,
) -> dict[str, Any]:
    """A spec of 31 tokens and 30 positions as the data of its YAML file; `model` are more of its keys."""
    start = {"kind": "encoder_decoder", "vocab": {"chars": CHARS}, "context": 30}
    return version_2(
        {
            "spec_version": 1,
            "name": name,
            "targets": ["cpu"],
            "model": {**start, "encoder": list(encoder), "decoder": list(decoder), **model},
            "fuse": list(fuse),
            "train": TRAIN,
            "eval": {"metric": "exact_match"},
        }
    )


def pairs_spec(*args: Any, **words: Any) -> Spec:
    """The checked spec; JSON is YAML."""
    return load(json.dumps(pairs_data(*args, **words)))[0]


def batch(spec: Spec, source: int = 9, target: int = 7, rows: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids of sources and targets, with pads at the end of all rows but the first."""
    generator = torch.Generator().manual_seed(seed)

    def side(length: int) -> Tensor:
        ids = torch.randint(3, spec.model.vocabulary, (rows, length), generator=generator)
        for row in range(rows):
            ids[row, length - row :] = 0
            ids[row, length - row - 1] = 2
        return ids

    return side(source), side(target)
