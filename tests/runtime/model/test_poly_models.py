"""The three models of the polynomial task against plain Torch, written apart from the compiler: parameters, loss, every
gradient, and decoding a token at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_models import batch
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler.spec.check import load
from specc.runtime.model.load import Loaded, instantiate
from specc.runtime.train.sources.feed import shifted

ROOT = Path(__file__).parents[3]
COUNTS = {"poly_lstm": 3_725_472, "poly_attn": 405_215, "poly_transformer": 4_758_528}
Weights = Mapping[str, Tensor]


@pytest.fixture(scope="module", params=COUNTS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A committed spec's module for the CPU in f32, with weights that leave no part without effect."""
    spec, _ = load(ROOT / f"specs/{request.param}.yaml")
    result = instantiate(spec, "cpu", tmp_path_factory.mktemp(request.param))
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in result.model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
            parameter.normal_(0, 1.0 if name.endswith((".token", ".norm_weight")) else spread)
    return result


def test_parameters_are_counted_exactly(loaded: Loaded) -> None:
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == COUNTS[loaded.spec.name]


def lstm_of(weights: Weights, at: str, sides: tuple[str, ...] = ("",)) -> nn.LSTM:
    """nn.LSTM over the weights at `at`; it has two biases, of which the first is zero where the model has one."""
    into, hidden = weights[f"{at}.input"].shape[1], weights[f"{at}.hidden"].shape[1]
    module = nn.LSTM(into, hidden, batch_first=True, bidirectional=len(sides) == 2)
    named = {}
    for side, suffix in zip(sides, ("", "_reverse"), strict=False):
        get = {name: weights.get(f"{at}.{side}{name}") for name in ("input", "hidden", "input_bias", "hidden_bias")}
        bias = weights.get(f"{at}.{side}bias")
        named[f"weight_ih_l0{suffix}"], named[f"weight_hh_l0{suffix}"] = get["input"], get["hidden"]
        named[f"bias_ih_l0{suffix}"] = torch.zeros(4 * hidden) if bias is not None else get["input_bias"]
        named[f"bias_hh_l0{suffix}"] = bias if bias is not None else get["hidden_bias"]
    return _with(module, named)


def attention_of(weights: Weights, at: str, heads: int, bias: bool) -> nn.MultiheadAttention:
    width = weights[f"{at}.q"].shape[0]
    module = nn.MultiheadAttention(width, heads, bias=bias, batch_first=True)
    named = {
        "in_proj_weight": torch.cat([weights[f"{at}.{n}"] for n in "qkv"]),
        "out_proj.weight": weights[f"{at}.out"],
    }
    if bias:
        named["in_proj_bias"] = torch.cat([weights[f"{at}.{n}_bias"] for n in "qkv"])
        named["out_proj.bias"] = weights[f"{at}.out_bias"]
    return _with(module, named)


def _with(module: Any, tensors: Mapping[str, Any]) -> Any:
    """The module computing with these tensors, so that gradients arrive at them."""
    for name in [name for name, _ in module.named_parameters()]:
        holder, _, last = name.rpartition(".")
        owner = module.get_submodule(holder)
        delattr(owner, last)
        setattr(owner, last, tensors[name])
    return module


def plain_transformer(w: Weights, source: Tensor, inputs: Tensor) -> Tensor:
    """Pre-norm encoder and decoder; logits [B, T, V]."""
    pads = source == 0

    def norm(x: Tensor, at: str) -> Tensor:
        return F.layer_norm(x, (256,), w[f"{at}.norm_weight"], w[f"{at}.norm_bias"])

    def mlp(x: Tensor, at: str) -> Tensor:
        return x + F.gelu(norm(x, f"{at}.mlp") @ w[f"{at}.mlp.up"].T) @ w[f"{at}.mlp.down"].T

    x = w["encoder.embed.token"][source] + w["encoder.embed.positions"][: source.shape[1]]
    for i in range(3):
        at = f"encoder.blocks.{i}"
        h = norm(x, f"{at}.attention")
        x = x + attention_of(w, f"{at}.attention", 8, False)(h, h, h, key_padding_mask=pads, need_weights=False)[0]
        x = mlp(x, at)
    memory = norm(x, "encoder.norm")
    later = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).triu(1)
    x = w["decoder.embed.token"][inputs] + w["decoder.embed.positions"][: inputs.shape[1]]
    for i in range(3):
        at = f"decoder.blocks.{i}"
        h = norm(x, f"{at}.attention")
        x = x + attention_of(w, f"{at}.attention", 8, False)(h, h, h, attn_mask=later, need_weights=False)[0]
        h, cross = norm(x, f"{at}.cross"), attention_of(w, f"{at}.cross", 8, False)
        x = x + cross(h, memory, memory, key_padding_mask=pads, need_weights=False)[0]
        x = mlp(x, at)
    return norm(x, "decoder.norm") @ w["decoder.embed.token"].T


def plain_attn(w: Weights, source: Tensor, inputs: Tensor) -> Tensor:
    """Token by token, as the model is described: attention to the tokens so far, then to the source, then the cell."""
    memory, (h, c) = lstm_of(w, "encoder.lstm", ("", "back_"))(w["encoder.embed.token"][source])
    state = tuple(torch.cat((s[0], s[1]), -1)[None] for s in (h, c))
    itself, cross = (attention_of(w, f"decoder.{name}", 4, True) for name in ("attention", "cross"))
    cell = lstm_of(w, "decoder.lstm")
    embedded = w["decoder.embed.token"][inputs]
    logits = []
    for t in range(inputs.shape[1]):
        e, before = embedded[:, t : t + 1], embedded[:, : t + 1]
        a = itself(e, before, before, need_weights=False)[0]
        a = cross(a, memory, memory, key_padding_mask=source == 0, need_weights=False)[0]
        y, state = cell(torch.cat((a, e), -1), state)
        logits.append(F.linear(y, w["head.logits"], w["head.logits_bias"]))
    return torch.cat(logits, 1)


def plain_lstm(w: Weights, source: Tensor, inputs: Tensor) -> Tensor:
    """Token by token: scores from the last h beside each value of the encoder, their mean, then the cell."""
    memory, (h, c) = lstm_of(w, "encoder.lstm", ("", "back_"))(w["encoder.embed.token"][source])
    h = F.linear(torch.cat((h[0], h[1]), -1), w["bridge.h"], w["bridge.h_bias"])
    c = F.linear(torch.cat((c[0], c[1]), -1), w["bridge.c"], w["bridge.c_bias"])
    at = "decoder.step"
    energy = torch.cat((w[f"{at}.additive.query"], w[f"{at}.additive.key"]), -1)
    names = ("input", "hidden", "input_bias", "hidden_bias")
    theirs = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cell = _with(nn.LSTMCell(960, 320), {a: w[f"{at}.lstm.{b}"] for a, b in zip(theirs, names, strict=True)})
    logits = []
    for t in range(inputs.shape[1]):
        both = torch.cat((h[:, None].expand(-1, memory.shape[1], -1), memory), -1)
        scores = F.relu(F.linear(both, energy, w[f"{at}.additive.key_bias"]))[..., 0]
        weights = scores.masked_fill(source == 0, float("-inf")).softmax(-1)
        context = (weights[..., None] * memory).sum(1)
        h, c = cell(torch.cat((context, w["decoder.embed.token"][inputs[:, t]]), -1), (h, c))
        logits.append(F.linear(h, w["head.logits"], w["head.logits_bias"]))
    return torch.stack(logits, 1)


PLAIN: Mapping[str, Callable[[Weights, Tensor, Tensor], Tensor]] = {
    "poly_transformer": plain_transformer,
    "poly_attn": plain_attn,
    "poly_lstm": plain_lstm,
}


def test_loss_and_every_gradient_equal_plain_torch(loaded: Loaded) -> None:
    model: Any = loaded.model
    source, target = batch(loaded.spec, 30, 30, rows=4)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = PLAIN[loaded.spec.name](weights, source, shifted(target))
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
    want.backward()
    model.zero_grad()
    loss = model.score(source, target).sum() / (target != 0).sum()  # as it trains, but for dropout
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        exact = weights[name].grad
        assert exact is not None and parameter.grad is not None
        error, size = (parameter.grad - exact).norm(), exact.norm()
        assert error < 2e-4 * size + 1e-7, f"{name}: error {error:.1e} of {size:.1e}"
        assert (size > 1e-5) != name.endswith(".k_bias"), name  # the softmax cancels what is the same for all keys


def test_decoding_by_state_equals_the_whole_line(loaded: Loaded) -> None:
    model: Any = loaded.model
    source, target = batch(loaded.spec, 30, 30, rows=4)
    inputs = shifted(target)
    with torch.no_grad():
        want = PLAIN[loaded.spec.name](dict(model.named_parameters()), source, inputs).log_softmax(-1)
        state = model.encode(source)
        for t in range(inputs.shape[1]):
            result = model.extend(inputs[:, t : t + 1], torch.tensor(t), state).log_softmax(-1)
            torch.testing.assert_close(result, want[:, t], rtol=1e-4, atol=2e-5)


def test_no_score_depends_on_later_tokens_of_the_line(loaded: Loaded) -> None:
    model: Any = loaded.model
    source, target = batch(loaded.spec, 30, 30, rows=2)
    with torch.no_grad():
        before = model.score(source, target)
        for j in (0, 1, 13, 28):
            changed = target.clone()
            changed[0, j] = changed[0, j] % 20 + 4
            moved = (model.score(source, changed) - before).abs()
            assert j == 0 or moved[0, :j].max() < 1e-5
            assert moved[0, j + 1 :].max() > 1e-4
            assert moved[1].max() < 1e-5


def test_a_transformer_reads_no_pads(loaded: Loaded) -> None:
    """Sources of other widths give the same; a recurrent encoder reads its pads, so its sources are of one width."""
    model: Any = loaded.model
    source, target = batch(loaded.spec, 20, 12)
    with torch.no_grad():
        difference = (model.score(F.pad(source, (0, 10)), target) - model.score(source, target)).abs().max()
    assert (difference < 1e-4) != loaded.spec.model.reads_pads
