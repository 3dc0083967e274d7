"""Modules that predict later tokens: their loss by hand, scores without them, and parameters of training alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, TRAIN, Pair, float64, pair, spec_data, spec_of
from torch import Tensor
from torch.nn import functional as F

from specc.compiler import pipeline
from specc.runtime.open_model import realize

CASES = [(form, modules) for form in ("heads", "sequential") for modules in (1, 2)]


def spec(form: str, modules: int, **term: Any) -> Any:
    data = spec_data((ATTENTION, MLP), fuse=(), blocks={"norm": {"kind": "rms", "weight": "w"}})
    ahead = {"kind": "module_ahead", "form": form, "modules": modules, "weight": 0.3, **term}
    data["train"] = {**TRAIN, "tokens_per_step": 24, "losses": [{"kind": "next_token"}, ahead]}
    return spec_of(data)


def norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def block(x: Tensor, p: dict[str, Tensor], at: str) -> Tensor:
    h = norm(x, p[f"{at}.attention.norm_weight"])
    q, k, v = ((h @ p[f"{at}.attention.{name}"].T).unflatten(-1, (2, 4)).transpose(1, 2) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + y @ p[f"{at}.attention.out"].T
    h = norm(x, p[f"{at}.mlp.norm_weight"])
    return x + (h @ p[f"{at}.mlp.up"].T).relu().square() @ p[f"{at}.mlp.down"].T


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize(("form", "modules"), CASES)
def test_loss_and_gradients_by_hand(form: str, modules: int, bos: int | None, tmp_path: Path) -> None:
    with float64():
        ours = pair(spec(form, modules, **({} if bos is None else {"bos": bos})), tmp_path)
        ids, targets = ours.batch()
        p, table = ours.params, ours.params["embed.token"]
        x = table[ids]
        for layer in range(2):
            x = block(x, p, f"blocks.{layer}")
        expected = F.cross_entropy((norm(x) @ table.T).flatten(0, 1), targets.flatten())
        stream, length = x, ids.shape[1]
        for k in range(1, modules + 1):
            at = f"ahead{k}"
            if form == "sequential":
                token = F.pad(table[targets][:, k - 1 :], (0, 0, 0, k - 1))  # the last positions have no target
                stream = torch.cat((norm(stream), norm(token)), -1) @ p[f"{at}.project"].T
            stream = block(stream if form == "sequential" else x, p, at)
            nats = -(norm(stream) @ table.T).log_softmax(-1)
            for t in range(length - k):
                for row in range(2):
                    if bos is None or bos not in targets[row, t : t + k].tolist():
                        expected = expected + 0.3 * nats[row, t, targets[row, t + k]] / (2 * length * modules)
        loss = ours.model(ids, targets, torch.tensor(0.3))
        torch.testing.assert_close(loss, expected)
        loss.backward()
        named = dict(ours.model.named_parameters())
        for name, gradient in zip(p, torch.autograd.grad(expected, list(p.values())), strict=True):
            torch.testing.assert_close(named[name].grad, gradient, rtol=1e-8, atol=1e-12)


LATENT = {"kind": "latent", "heads": 2, "kv_rank": 6, "rope_dim": 4}
MOE = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16, "act": "silu(gate) * x"}
DOCUMENTS = {**ATTENTION, "rope": {}, "bos": 1, "mask": "j <= i and document(i) == document(j)"}
LAYER_NORM = {"blocks": {"norm": {"kind": "layer", "places": ["before", "after"]}}, "norm": {"kind": "layer"}}
FUSED = ({"ahead1.mlp": ["up", "act", "down"]}, {"ahead1.attention": ["y"]}, {"head": ["logits", "loss"]})


def loss_equal_to_the_reference(ours: Pair, ids: Tensor, targets: Tensor) -> Tensor:
    weight = torch.tensor(0.3)
    loss: Tensor = ours.model(ids, targets, weight)
    expected = ours.reference("train", ids=ids, targets=targets, module_ahead_weight=weight)["loss"]
    torch.testing.assert_close(loss, expected)
    return loss


@pytest.mark.parametrize("form", ["heads", "sequential"])
@pytest.mark.parametrize(
    "options",
    [{"layers": (DOCUMENTS, MLP)}, {"layers": (LATENT, MOE)}, LAYER_NORM, {"fuse": FUSED}, {"head": {"tied": False}}],
    ids=["documents", "latent", "layer_norm", "fused", "untied"],
)
def test_a_module_is_a_block_like_the_last_one(options: dict[str, Any], form: str, tmp_path: Path) -> None:
    data = spec_data(**{"fuse": (), **options})
    data["train"]["losses"] = [
        {"kind": "next_token"},
        {"kind": "module_ahead", "form": form, "modules": 2, "weight": 1},
    ]
    with float64():
        ours = pair(spec_of(data), tmp_path)
        loss_equal_to_the_reference(ours, *ours.batch()).backward()
        assert all(value.grad is not None for value in ours.model.parameters())


def test_scores_and_a_weight_of_zero_are_those_of_the_model_alone(tmp_path: Path) -> None:
    term = spec("sequential", 2)
    ours = pair(term, tmp_path / "with")
    weights = {name: value.detach().float() for name, value in ours.params.items()}
    alone = realize(term, "cpu", None, weights)
    assert not any("ahead" in name for name, _ in alone.model.named_parameters())
    assert len([name for name in weights if "ahead" in name]) == 18
    model: Any = ours.model.float()
    ids, targets = ours.batch()
    with torch.no_grad():
        assert torch.equal(model.score(ids, targets), alone.model.score(ids, targets))  # type: ignore[operator]
        assert torch.equal(model(ids, targets, torch.tensor(0.0)), alone.model(ids, targets))


def test_artifacts_have_the_parameters_of_scoring() -> None:
    term = spec("heads", 1)
    programs = pipeline.lower(term, "cpu")
    rest = pipeline.lower(term.at_rest, "cpu")
    assert [p.name for p in programs.stored] == [p.name for p in rest.params] == [p.name for p in rest.stored]
    assert {p.name for p in programs.params if p.training} == {p.name for p in programs.params if "ahead1." in p.name}


def test_modules_read_the_tokens_of_the_prefix(tmp_path: Path) -> None:
    """The loss ignores targets in the prefix, but the modules read the embeddings of all next tokens."""
    data = spec_data(({**ATTENTION, "mask": "j <= i or j < prefix"}, MLP), fuse=(), prefix=4)
    ahead = {"kind": "module_ahead", "form": "sequential", "modules": 2, "weight": 1}
    data["train"]["losses"] = [{"kind": "next_token"}, ahead]
    with float64():
        ours = pair(spec_of(data), tmp_path)
        ids, targets = ours.batch()
        changed = targets.clone()
        changed[:, 0] = (changed[:, 0] + 1) % 11
        loss, other = (loss_equal_to_the_reference(ours, ids, values) for values in (targets, changed))
        assert not torch.equal(loss, other)
