"""Small models with int8 products, quantized from random weights on random lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import version_2
from torch import Tensor, nn

from specc.compiler import pipeline
from specc.compiler.int8.editor import Source
from specc.compiler.int8.products import integer_products
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.calibration.input_ranges import input_ranges
from specc.runtime.open_model import realize, realize_stored
from specc.runtime.quantize.assignment import base_schemes, resolved
from specc.runtime.quantize.quantizer import IntegerInputs, Quantizer

CHARS = "(7-3*z)59s2n1x4c8+kojhy60ita"
QUANT: dict[str, Any] = {
    "default": {"scheme": "int8"},
    "rules": [{"match": "*.{token,positions,norm_weight,norm_bias}", "scheme": "none", "dtype": "f32"}],
}
WIDE: dict[str, Any] = {**QUANT, "default": {"scheme": "int8", "activation_bits": 16}}
BY_FEATURE: dict[str, Any] = {**QUANT, "default": {"scheme": "int8", "activations": "per_channel"}}
LSTM: dict[str, Any] = {
    "kind": "encoder_decoder",
    "vocab": {"chars": CHARS},
    "context": 30,
    "encoder": [{"kind": "embed", "dim": 12}, {"kind": "lstm", "hidden": 8, "directions": "both", "biases": 1}],
    "bridge": {"kind": "concat"},
    "decoder": [
        {"kind": "embed", "dim": 16},
        {"kind": "attention", "of": "self", "heads": 2, "bias": True},
        {"kind": "attention", "name": "cross", "of": "encoder", "heads": 2, "bias": True},
        {"kind": "concat", "beside": "embed"},
        {"kind": "lstm", "hidden": 16, "biases": 1},
    ],
    "head": {"tied": False, "bias": True},
}
ADDITIVE: dict[str, Any] = {
    **LSTM,
    "bridge": {"kind": "linear"},
    "decoder": [
        {"kind": "embed", "dim": 12},
        {"kind": "additive", "query": "lstm", "form": "relu"},
        {"kind": "concat", "beside": "embed"},
        {"kind": "lstm", "hidden": 12, "biases": 2},
    ],
}
LOOPS: dict[str, Any] = {
    **LSTM,
    "bridge": {"kind": "linear"},
    "decoder": [
        {"kind": "embed", "dim": 12},
        {"kind": "additive", "query": "low", "name": "ask_low"},
        {"kind": "additive", "query": "lstm"},
        {"kind": "concat", "beside": "ask_low"},
        {"kind": "concat", "name": "both", "beside": "embed"},
        {"kind": "lstm", "name": "low", "hidden": 12},
        {"kind": "lstm", "hidden": 8, "biases": 2},
        {"kind": "additive", "query": "last", "name": "again"},
        {"kind": "concat", "name": "late", "beside": "low"},
        {"kind": "lstm", "name": "last", "hidden": 8},
    ],
}
BLOCKS: dict[str, Any] = {
    **{key: LSTM[key] for key in ("kind", "vocab", "context")},
    "encoder": [
        {"kind": "embed", "dim": 16, "positions": "learned"},
        {
            "kind": "blocks",
            "count": 2,
            "norm": {"kind": "layer"},
            "layers": [{"kind": "attention", "heads": 2}, {"kind": "mlp", "hidden": 24, "act": "gelu(x)"}],
        },
    ],
    "decoder": [
        {"kind": "embed", "dim": 16, "positions": "learned"},
        {
            "kind": "blocks",
            "count": 2,
            "norm": {"kind": "layer"},
            "layers": [
                {"kind": "attention", "heads": 2},
                {"kind": "attention", "name": "cross", "of": "encoder", "heads": 2},
                {"kind": "mlp", "hidden": 24, "act": "gelu(x)"},
            ],
        },
    ],
    "head": {"tied": True},
}
MODELS = {"lstm": LSTM, "additive": ADDITIVE, "loops": LOOPS, "blocks": BLOCKS}


def data_of(model: Mapping[str, Any], quant: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A spec of pairs as the data of its YAML file."""
    return version_2(
        {
            "spec_version": 1,
            "name": "tiny_int8",
            "targets": ["cpu"],
            "model": dict(model),
            "quant": dict(quant or QUANT),
            "train": {
                "data": {"kind": "polynomial", "lines": 100},
                "batch": 4,
                "steps": 1,
                "optimizers": [{"match": "*", "kind": "adamw", "lr": 0.001}],
            },
            "eval": {"metric": "exact_match"},
            **more,
        }
    )


@dataclass(frozen=True)
class Int8Models:
    """A model in floats, the same from the values that its codes stand for, and in int8."""

    spec: Spec
    weights: dict[str, Tensor]
    sources: tuple[Source, ...]
    stored: QuantizedModel
    floats: nn.Module
    rounded: nn.Module
    whole: nn.Module


def lines(seed: int, rows: int = 6, window: int = 30) -> tuple[Tensor, Tensor]:
    """Random sources and targets, stopped and padded."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(2):
        ids = torch.randint(3, 31, (rows, window), generator=generator)
        ends = torch.randint(2, 12, (rows, 1), generator=generator)
        places = torch.arange(window)
        results.append(torch.where(places < ends, ids, torch.where(places == ends, 2, 0)))
    return results[0], results[1]


def quantized_model(spec: Spec, seed: int = 0, uneven: float = 0.0, target: str = "cpu") -> Int8Models:
    """With `uneven`, embedded features differ in size by e to the power of that many standard deviations."""
    programs = pipeline.lower(spec, "cpu")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for param in programs.params:
        spread = 0.2 if len(param.shape) < 2 else 1.2 * param.shape[-1] ** -0.5
        weights[param.name] = torch.randn(param.shape, generator=generator) * spread
        if uneven and param.name.endswith("embed.token"):
            weights[param.name] *= torch.exp(uneven * torch.randn(param.shape[-1], generator=generator))
    schemes = base_schemes(spec.quant, programs.params)
    sources = integer_products(programs, schemes)
    batches = [dict(zip(("source", "target"), lines(100 + i), strict=True)) for i in range(8)]
    ranges = input_ranges(programs, sources, batches, weights)
    stored = Quantizer(weights, inputs=IntegerInputs(sources, ranges)).model(schemes)
    final = resolved(spec, schemes)
    return Int8Models(
        final,
        weights,
        sources,
        stored,
        realize(final, target, None, weights).model,
        realize(final, target, None, dequantized(stored)).model,
        realize_stored(final, target, None, stored, dequantized(stored)).model,
    )
