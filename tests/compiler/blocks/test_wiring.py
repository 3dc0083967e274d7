"""Wiring that no option of an older version had: several streams, layers of another kind, numbers by layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, float64, pair, tiny

from specc.compiler.blocks.wiring import parse_wiring, wrapped
from specc.compiler.expr import parse

THREE = {
    "read": {"a": "x", "b": "0.5 * x", "c": "x0"},
    "write": "a + c * attention + mlp * b",
    "layers": ({**ATTENTION, "read": "b"}, {**MLP, "read": "tanh(c)"}),
}
CASES: dict[str, dict[str, Any]] = {
    "norms of another kind": {"changes": [{"where": "layer == 1", "norm": {"kind": "layer"}}]},
    "another mlp": {"changes": [{"where": "layer % 2 == 0", "mlp": {"hidden": 5, "act": "gelu(x)"}}]},
    "windows by layer": {
        "changes": [{"where": "layer != 1", "attention": {"mask": "j <= i and i - j < 3", "rope": {"base": 100}}}]
    },
    "numbers by layer": {"layers": ({**ATTENTION, "write": "x + y * (layer + 1) / layers + layer * x0"}, MLP)},
    "learned by layer": {"learn": {"gain": {"init": "1 / (layer + 1)", "shape": 1}}, "read": "gain * x"},
    "three streams": THREE,
    "dense": {"changes": [{"where": "layer == 2", "read": "x + output(0) * sigmoid(output(1)) + output(0)"}]},
    "another order": {"order": "0..2 1 0"},
}


@pytest.mark.parametrize("name", CASES)
def test_programs_equal_their_references(name: str, tmp_path: Path) -> None:
    case = dict(CASES[name])
    layers = case.pop("layers", (ATTENTION, MLP))
    with float64():
        one = pair(tiny(layers=layers, blocks=case, count=3), tmp_path)
        ids, targets = one.batch()
        wanted = one.reference("score", ids=ids, targets=targets)["loss"]
        nats = one.model.score(ids, targets)
        assert torch.allclose(nats, wanted, rtol=1e-9, atol=1e-9)
        later = ids.clone()
        later[:, 7] = (later[:, 7] + 1) % 11
        moved = one.model.score(later, targets)
        assert torch.equal(moved[:, :7], nats[:, :7]) and not torch.equal(moved[:, 7:], nats[:, 7:])
        cache = one.model.new_cache(2, 12)
        logits = [one.model.decode(ids[:, t : t + 1], torch.tensor(t), cache) for t in range(12)]
        cached = -torch.stack(logits, 1).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        assert torch.allclose(cached, wanted, rtol=1e-8, atol=1e-8)


def test_a_changed_stream_is_found_in_an_expression() -> None:
    base = parse("a * x + b * x0")
    inner = wrapped(base, parse("a * (x + s) + b * x0"), "x")
    assert inner == parse("x + s")
    assert wrapped(base, parse("a * x + c * x0"), "x") is None
    assert wrapped(parse("x * x"), parse("s * x"), "x") is None


def test_names_and_outputs_of_an_expression() -> None:
    wiring = parse_wiring("mix.stream * x + output(9 - layer) - output(9-layer) * output(0)")
    assert wiring.names == {"mix_stream": "mix.stream", "x": "x"}
    assert list(wiring.outputs.values()) == ["9 - layer", "0"]
