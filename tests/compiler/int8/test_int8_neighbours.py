"""Int8 products beside what else a model has: gates, views, waves, floats, states that nobody reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from pair_models import SELF, blocks, pairs_data
from tiny_models import ATTENTION, spec_data, spec_of

from specc.compiler import pipeline
from specc.runtime.artifact.quantized_model import dequantized
from specc.runtime.open_model import realize, realize_stored
from specc.runtime.quantize.assignment import resolved
from specc.runtime.verify import deployed as checks
from specc.runtime.verify.deployed import verify_deployed
from specc.runtime.verify.verify import batch_of

FLOATS: dict[str, Any] = {"scheme": "none", "dtype": "f32"}
EMBED: dict[str, Any] = {"kind": "embed", "dim": 16}
WAVES: dict[str, Any] = {**EMBED, "positions": "sinusoidal"}
LSTM: dict[str, Any] = {"kind": "lstm", "hidden": 16}
BOTH: dict[str, Any] = {"kind": "lstm", "hidden": 8, "directions": "both", "biases": 1}
GATED: dict[str, Any] = {"kind": "mlp", "hidden": 32, "act": "silu(gate) * x"}
CROSS: dict[str, Any] = {"kind": "attention", "name": "cross", "of": "encoder", "heads": 2}
REPEAT: dict[str, Any] = {"kind": "repeat"}
UNTIED: dict[str, Any] = {"head": {"tied": False, "bias": True}}


def quant(*patterns: str, bits: int = 8) -> dict[str, Any]:
    """Int8 of what the patterns match, floats of all else."""
    return {
        "default": FLOATS,
        "rules": [{"match": match, "scheme": "int8", "activation_bits": bits} for match in patterns],
    }


def text(layers: Sequence[Mapping[str, Any]], scheme: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec_data(layers, fuse=(), dim=16), "quant": dict(scheme)}


def pairs(encoder: Sequence[Any], decoder: Sequence[Any], scheme: Mapping[str, Any], **model: Any) -> dict[str, Any]:
    return {**pairs_data(encoder, decoder, **model), "quant": dict(scheme)}


def gated(bits: int) -> dict[str, Any]:
    side = [EMBED, blocks(SELF, GATED, norm={"kind": "layer"})]
    return pairs(side, [EMBED, blocks(SELF, CROSS, GATED)], quant("*.mlp.{up,gate,down}", bits=bits))


def by_layer(**attention: Any) -> dict[str, Any]:
    """Biases, norms before and behind, and another form of attention in one layer."""
    data = text(({**ATTENTION, "bias": ["q", "k"]}, {**GATED, "bias": True}), quant("*.{q,k,v,out,up,gate,down}"))
    norm = {"kind": "rms", "weight": "1 + w", "places": ["before", "after"]}
    data["model"]["blocks"] |= {"norm": norm, "changes": [{"where": "layer == 1", "attention": attention}]}
    return data


CASES: Mapping[str, dict[str, Any]] = {
    "gate": text((ATTENTION, GATED), quant("*.mlp.{up,gate}")),
    "gate of 16 bits": text((ATTENTION, GATED), quant("*.mlp.{up,gate}", bits=16)),
    "gate of padded rows": text((ATTENTION, {**GATED, "hidden": 24}), quant("*.mlp.*")),
    "gate alone": text((ATTENTION, GATED), quant("*.mlp.gate")),
    "gates of pairs": gated(8),
    "gates of pairs of 16 bits": gated(16),
    "lstm ahead of a head of 16 bits": pairs([EMBED, LSTM], [REPEAT, LSTM], quant("head.*", bits=16), **UNTIED),
    "repeated ahead of attention": pairs(
        [EMBED, LSTM],
        [REPEAT, blocks(SELF, norm={"kind": "layer"})],
        quant("decoder.*.attention.{q,k,v,out}"),
        **UNTIED,
    ),
    "repeated ahead of attention of 16 bits": pairs(
        [EMBED, LSTM],
        [REPEAT, blocks(SELF, norm={"kind": "layer"})],
        quant("decoder.*.attention.{q,k,v,out}", bits=16),
        **UNTIED,
    ),
    "waves": pairs([WAVES, blocks(SELF)], [WAVES, blocks(SELF, CROSS)], quant("*.{q,k,v,out}")),
    "float biases": pairs(
        [EMBED, BOTH],
        [EMBED, {**SELF, "bias": True}, {**CROSS, "bias": True}, {"kind": "concat", "beside": "embed"}, LSTM],
        quant("decoder.cross.{k,v,q}", "head.logits"),
        bridge={"kind": "concat"},
        **UNTIED,
    ),
    "float biases and a residual": pairs(
        [EMBED, blocks({**SELF, "bias": True})], [EMBED, blocks({**SELF, "bias": True}, CROSS)], quant("*.{q,k,v,out}")
    ),
    "residuals of several factors": pairs(
        [EMBED, blocks(SELF, {**GATED, "residual": 0.25})],
        [EMBED, blocks(SELF, CROSS, {**GATED, "residual": 0.5})],
        quant("*.{out,up,down}"),
    ),
    "last state unread": pairs(
        [EMBED, {**BOTH, "name": "l1"}, {**BOTH, "name": "l2"}],
        [EMBED, LSTM],
        quant("encoder.*.{input,hidden,back_input,back_hidden,bias,back_bias}"),
        bridge={"kind": "concat"},
    ),
    "heads by layer": by_layer(kv_heads=1, qk_norm={"weight": "w", "over": "all"}),
    "mlp instead of attention": by_layer(**{**GATED, "hidden": 24}),
    "sequence unread": pairs([EMBED, BOTH], [EMBED, LSTM], quant("encoder.lstm.*"), bridge={"kind": "concat"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_deployed_model_computes_what_its_reference_does(name: str) -> None:
    results = list(verify_deployed(spec_of(CASES[name]), ("cpu",)))
    assert [check for check in results if not check.ok] == []
    assert any(check.name.startswith("kernel int8") for check in results)


@pytest.mark.parametrize("name", CASES)
def test_the_deployed_model_is_near_the_floats(name: str) -> None:
    """The references of the parts compute the same as the model before: no part is lost or counted twice."""
    spec = spec_of(CASES[name])
    torch.manual_seed(1)
    programs = pipeline.lower(spec, "cpu")
    weights = {
        param.name: torch.randn(param.shape) * (0.2 if len(param.shape) < 2 else (3.0 / param.shape[-1]) ** 0.5)
        for param in programs.params
    }
    hessians = {name: torch.eye(weight.shape[-1]).double() for name, weight in weights.items() if weight.dim() > 1}
    batches = [batch_of(spec, programs, "score", 16, min(spec.model.window, 48), "cpu")]
    stored, _ = checks.quantized(spec, "cpu", weights, batches, hessians)
    floats = realize(resolved(spec, stored.schemes), "cpu", None, weights)
    whole = realize_stored(resolved(spec, stored.schemes), "cpu", None, stored, dequantized(stored))
    inputs = batch_of(spec, whole.programs, "score", 8, min(spec.model.window, 20), "cpu")
    with torch.no_grad():
        exact, result = (module.model.score(*inputs.values()) for module in (floats, whole))  # type: ignore[operator]
    assert 0 < float((result - exact).square().mean()) < 0.03 * float(exact.var())
