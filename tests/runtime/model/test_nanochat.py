"""nanochat_d12 against a plain model, which is written from the published one without the compiler."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tiny_models import float64, pair
from torch import Tensor
from torch.nn import functional as F

from specc.compiler import pipeline
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec

PATH = Path(__file__).parents[3] / "specs" / "nanochat_d12.yaml"
LAYERS, HEADS, SIZE, WINDOW = 8, 6, 8, 5
DIM, VOCAB, CONTEXT = HEADS * SIZE, 40, 24


def small() -> Spec:
    """The committed spec with other sizes."""
    sizes = {
        "vocab": VOCAB,
        "dim": DIM,
        "context": CONTEXT,
        "blocks.count": LAYERS,
        "blocks.layers.0.mask": f"j <= i and i - j <= {WINDOW}",
    }
    texts = (f"model.{key}={value}" for key, value in sizes.items())
    return load(PATH, (*texts, "train.tokens_per_step=768"))[0]


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    """x [B, T, H, C]: the halves a, b of each head at position t become a cos + b sin, b cos - a sin."""
    a, b = x.chunk(2, -1)
    angle = torch.arange(x.shape[1])[:, None] * 1e5 ** (-torch.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def plain_loss(p: Mapping[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of parameters by the names of the spec."""
    x = norm(p["embed.token"][ids])
    gate = p["embed.smear_by_token.scale"] * torch.sigmoid(x[:, 1:, :24] @ p["embed.smear_by_token.gate"].T)
    x = x0 = torch.cat((x[:, :1], x[:, 1:] + gate * x[:, :-1]), 1)
    tokens = torch.arange(ids.shape[1])
    distance = tokens[:, None] - tokens
    middle = x
    for layer in range(LAYERS):
        b = f"blocks.{layer}"
        x = p[f"{b}.stream"] * x + p[f"{b}.embedded"] * x0
        h = norm(x)
        q, k, v = ((h @ p[f"{b}.attention.{n}"].T).unflatten(-1, (HEADS, SIZE)) for n in "qkv")
        if layer % 2 == 1:
            opened = 3 * torch.sigmoid(h[..., :12] @ p[f"{b}.attention.open"].T)
            v = v + opened[..., None] * p[f"{b}.attention.table"][ids].unflatten(-1, (HEADS, SIZE))
        q, k = 1.2 * norm(turned(q)), 1.2 * norm(turned(k))
        scores = torch.einsum("bihc,bjhc->bhij", q, k) / SIZE**0.5
        seen = distance >= 0 if layer % 4 == 3 or layer == LAYERS - 1 else (distance >= 0) & (distance <= WINDOW)
        y = torch.einsum("bhij,bjhc->bihc", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = x + y.flatten(2) @ p[f"{b}.attention.out"].T
        x = x + (norm(x) @ p[f"{b}.mlp.up"].T).relu().square() @ p[f"{b}.mlp.down"].T
        middle = x if layer == LAYERS // 2 else middle
    x = norm(x - p[f"blocks.{LAYERS - 1}.mlp.back"] * middle)
    logits = 15 * torch.tanh(x @ p["head.logits"].T / 15)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
def test_loss_and_gradients_are_those_of_a_plain_model(tmp_path: Path, fuse: bool) -> None:
    with float64():
        ours = pair(small(), tmp_path, fuse=fuse)
        ids, targets = ours.batch()
        expected = plain_loss(ours.params, ids, targets)
        wanted = dict(zip(ours.params, torch.autograd.grad(expected, list(ours.params.values())), strict=True))
        loss = ours.model(ids, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        loss.backward()
        for name, parameter in ours.model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-7, atol=1e-9)


def test_the_full_size_has_the_parameters_of_the_source() -> None:
    """Tables of 32,768 tokens: of the tokens, of the logits, and of six layers' values."""
    layers, dim, vocab = 12, 768, 32768
    matrices = layers * (4 + 8) * dim * dim
    gates = layers // 2 * 6 * 12
    scalars = 2 * layers + 24 + 1 + 1  # two per layer, the gate and factor of the smear, the backout
    programs = pipeline.lower(load(PATH)[0], "cpu")
    assert sum(param.count for param in programs.params) == 8 * vocab * dim + matrices + gates + scalars == 286_261_730
