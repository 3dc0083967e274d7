"""Wiring that no option of an older version had: several streams, layers of another kind, numbers by layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, float64, pair, tiny

from specc.compiler.errors import SpecError
from specc.compiler.expr import parse
from specc.compiler.expr.wiring import parse_wiring, wrapped

THREE = {
    "read": {"a": "x", "b": "0.5 * x", "c": "x0"},
    "write": "a + c * attention + mlp * b",
    "layers": ({**ATTENTION, "read": "b"}, {**MLP, "read": "tanh(c)"}),
}


def mixed(where: str, v: str) -> dict[str, Any]:
    return {"where": where, "attention": {"v": v, "learn": {"share": {"init": 0.5, "shape": 1}}}}


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
    "values of the first block": {"changes": [mixed("layer > 0", "share * v + (1 - share) * value(0)")]},
    "values alone": {"changes": [{"where": "layer > 0", "attention": {"v": "value(0)"}}]},
    "values of several runs": {
        "order": "0..2 1..2",
        "layers": ({**ATTENTION, "kv_heads": 1, "mask": "j <= i and i - j < 3"}, MLP),
        "changes": [mixed("layer > 0", "share * v + layer * value(run - 1) + value(0)")],
    },
    "values past a block without attention": {
        "layers": (ATTENTION, {**ATTENTION, "name": "second"}, MLP),
        "changes": [
            {"where": "layer == 1", "attention": None},
            {"where": "layer == 2", "attention": {"v": "v + value(0)"}, "second": {"v": "v - value(1)"}},
        ],
    },
}


@pytest.mark.parametrize("name", CASES)
def test_programs_equal_their_references(name: str, tmp_path: Path) -> None:
    case = dict(CASES[name])
    layers = case.pop("layers", (ATTENTION, MLP))
    with float64():
        models = pair(tiny(layers=layers, blocks=case, count=3), tmp_path)
        ids, targets = models.batch()
        wanted = models.reference("score", ids=ids, targets=targets)["loss"]
        nats = models.model.score(ids, targets)
        assert torch.allclose(nats, wanted, rtol=1e-9, atol=1e-9)
        later = ids.clone()
        later[:, 7] = (later[:, 7] + 1) % 11
        moved = models.model.score(later, targets)
        assert torch.equal(moved[:, :7], nats[:, :7]) and not torch.equal(moved[:, 7:], nats[:, 7:])
        cache = models.model.new_cache(2, 12)
        logits = [models.model.decode(ids[:, t : t + 1], torch.tensor(t), cache) for t in range(12)]
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
    assert list(map(str, wiring.earlier.values())) == ["output(9 - layer)", "output(0)"]


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("fuse", [True, False])
def test_a_learned_value_may_have_the_name_of_an_argument(tmp_path: Path, fuse: bool) -> None:
    """`skip` is the argument for an earlier output in generated code, and here also a learned value."""
    change = {
        "where": "layer == 2",
        "learn": {"skip": {"init": 1, "shape": 1}},
        "read": "x + sigmoid(skip) * output(0)",
    }
    with float64():
        ours = pair(tiny((MLP,), count=3, blocks={"changes": [change]}), tmp_path, fuse=fuse)
        ids, targets = ours.batch()
        p = ours.params
        x, outputs = p["embed.token"][ids], []
        for layer in range(3):
            x = x + torch.sigmoid(p["blocks.2.skip"]) * outputs[0] if layer == 2 else x
            x = x + (norm(x) @ p[f"blocks.{layer}.mlp.up"].T).relu().square() @ p[f"blocks.{layer}.mlp.down"].T
            outputs.append(x)
        logits = norm(x) @ p["embed.token"].T
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(ours.model(ids, targets), expected)


@pytest.mark.parametrize("fuse", [True, False])
def test_null_removes_a_layer(tmp_path: Path, fuse: bool) -> None:
    """A block without attention has none of its parameters and computes its MLP alone."""
    changes = [{"where": "layer == 0", "attention": None}, {"where": "layer == 1", "mlp": None}]
    with float64():
        ours = pair(tiny((ATTENTION, MLP), count=2, blocks={"changes": changes}), tmp_path, fuse=fuse)
        assert [name for name in ours.params if name.startswith("blocks")] == [
            *(f"blocks.0.mlp.{name}" for name in ("up", "down")),
            *(f"blocks.1.attention.{name}" for name in ("q", "k", "v", "out")),
        ]
        ids, targets = ours.batch()
        p = ours.params
        x = p["embed.token"][ids]
        x = x + (norm(x) @ p["blocks.0.mlp.up"].T).relu().square() @ p["blocks.0.mlp.down"].T
        q, k, v = ((norm(x) @ p[f"blocks.1.attention.{n}"].T).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv")
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = norm(x + y @ p["blocks.1.attention.out"].T) @ p["embed.token"].T
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(ours.model(ids, targets), expected)


@pytest.mark.parametrize("fuse", [True, False])
def test_values_of_the_first_block_by_hand(tmp_path: Path, fuse: bool) -> None:
    """ResFormer: v of each later block is mixed with the values of block 0. Values and all gradients."""
    with float64():
        model = tiny((ATTENTION, MLP), count=3, blocks={"changes": [mixed("layer > 0", "v + share * value(0)")]})
        ours = pair(model, tmp_path, fuse=fuse)
        ids, targets = ours.batch()
        p = ours.params
        x, first = p["embed.token"][ids], None
        for layer in range(3):
            q, k, v = (
                (norm(x) @ p[f"blocks.{layer}.attention.{n}"].T).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv"
            )
            first, v = (v, v) if first is None else (first, v + p[f"blocks.{layer}.attention.share"] * first)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + y @ p[f"blocks.{layer}.attention.out"].T
            x = x + (norm(x) @ p[f"blocks.{layer}.mlp.up"].T).relu().square() @ p[f"blocks.{layer}.mlp.down"].T
        logits = norm(x) @ p["embed.token"].T
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = ours.model(ids, targets)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        named = dict(ours.model.named_parameters())
        for name, gradient in zip(p, torch.autograd.grad(expected, list(p.values())), strict=True):
            torch.testing.assert_close(named[name].grad, gradient)


def test_errors_behind_a_removed_layer_stand_at_their_field() -> None:
    """The MLP is the second layer of the spec and the first of the block."""
    changes = [
        {"where": "layer == 0", "attention": None},
        {"where": "layer == 0", "mlp": {"ratio": 3.3, "hidden": None}},
    ]
    with pytest.raises(SpecError, match=r"S215 `ratio` 3\.3 times `dim` 8") as caught:
        tiny((ATTENTION, MLP), blocks={"changes": changes})
    assert '"ratio": 3.3' in str(caught.value)


def test_a_block_without_layers_is_refused() -> None:
    changes = [{"where": "layer == 0", "attention": None, "mlp": None}]
    with pytest.raises(SpecError, match="block 0 has no layers"):
        tiny((ATTENTION, MLP), blocks={"changes": changes})
