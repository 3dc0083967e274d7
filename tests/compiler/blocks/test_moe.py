"""Mixtures of experts: a loop over experts gives the same, no token depends on others, losses and the bias balance."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_mlp_layers import MOE
from tiny_models import ATTENTION, float64, pair, spec_data, spec_of, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler import pipeline
from specc.runtime.model.load import instantiate

LOSSES = ("balance", "sequence_balance", "z")
TERMS = [{"kind": "next_token"}, *({"kind": "auxiliary", "name": f"moe.{name}", "weight": 1} for name in LOSSES)]


def only_experts(folder: Path, dim: int = 8, **options: Any) -> Any:
    """A model of one block, whose only layer is a mixture of experts."""
    data = spec_data(layers=({**MOE, **options},), fuse=(), count=1, dim=dim)
    return instantiate(spec_of(data), "cpu", folder).model


def filled(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model


def by_loop(x: Tensor, moe: Any, top_k: int, scored: str, normalize: bool, scale: float, shared: bool) -> Tensor:
    """The layer of h = norm(x), expert by expert and token by token."""
    h = F.rms_norm(x, (x.shape[-1],), eps=1e-6).flatten(0, 1)
    logits = h @ moe.router.T
    scores = logits.softmax(-1) if scored == "softmax" else logits.sigmoid()
    biased = scores + moe.router_bias if hasattr(moe, "router_bias") else scores
    rows = []
    for token, row, choice in zip(h, scores, biased, strict=True):
        chosen = choice.detach().topk(top_k).indices
        weights = row[chosen] / row[chosen].sum() if normalize else row[chosen]
        parts = [moe.down[e] @ (F.silu(moe.gate[e] @ token) * (moe.up[e] @ token)) for e in chosen]
        rows.append(sum((scale * w * part for w, part in zip(weights, parts, strict=True)), torch.zeros_like(token)))
        if shared:
            rows[-1] = rows[-1] + moe.shared.down @ (F.silu(moe.shared.gate @ token) * (moe.shared.up @ token))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    ("experts", "top_k", "scored", "normalize", "scale", "shared"),
    [(8, 2, "softmax", True, 1.0, 0), (5, 1, "softmax", False, 1.0, 1), (16, 6, "sigmoid", True, 2.5, 2),
     (3, 3, "sigmoid", False, 0.5, 0)],
)  # fmt: skip
def test_grouped_products_equal_a_loop_over_experts(
    experts: int, top_k: int, scored: str, normalize: bool, scale: float, shared: int, tmp_path: Path
) -> None:
    """Values and gradients of the input and of all parameters, in float64."""
    router = {"score": scored, "normalize": normalize, "scale": scale, "bias": True}
    sizes = {"experts": experts, "top_k": top_k, "shared_experts": shared}
    with float64():
        model = filled(only_experts(tmp_path, router=router, **sizes).double(), experts)
        block = model.blocks[0]
        x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
        weight = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        leaves = [x, *(value for name, value in block.named_parameters() if not name.endswith("router_bias"))]
        y = block(x)
        wanted = x + by_loop(x, block.moe, top_k, scored, normalize, scale, bool(shared))
        torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
        gradients = (torch.autograd.grad((value * weight).sum(), leaves) for value in (y, wanted))
        for ours, theirs in zip(*gradients, strict=True):
            assert theirs.abs().max() > 0
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "version", "router"),
    [
        ("deepseek_v2", "V2", {"score": "softmax", "scale": 1.0}),
        ("deepseek_v2", "V2", {"score": "softmax", "scale": 16.0}),
        ("deepseek_v3", "V3", {"score": "sigmoid", "scale": 2.5, "bias": True, "normalize": True}),
        ("deepseek_v3", "V3", {"score": "sigmoid", "scale": 1.0, "bias": True, "normalize": False}),
    ],
)
def test_experts_of_deepseek(module: str, version: str, router: dict[str, Any], tmp_path: Path) -> None:
    """The layer of Transformers with equal weights. The sizes are small, and no experts are in groups."""
    normalize = {"norm_topk_prob": router["normalize"]} if version == "V3" else {"topk_method": "greedy"}
    config = getattr(transformers, f"Deepseek{version}Config")(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
        routed_scaling_factor=router["scale"], n_group=1, topk_group=1, num_attention_heads=2, **normalize,
    )  # fmt: skip
    library = getattr(transformers.models, module)
    source = __import__(f"{library.__name__}.modeling_{module}", fromlist=["x"])
    theirs: nn.Module = filled(getattr(source, f"Deepseek{version}{'Moe' if version == 'V2' else 'MoE'}")(config), 4)
    sizes = {"experts": 8, "top_k": 3, "hidden": 16, "shared_experts": 2}
    ours = only_experts(tmp_path, 32, router={"normalize": False, **router}, **sizes)
    moe, given = ours.blocks[0].moe, dict(theirs.named_parameters())
    gate, up = given["experts.gate_up_proj"].chunk(2, 1)
    with torch.no_grad():
        for name, value in (
            ("router", given["gate.weight"]), ("gate", gate), ("up", up), ("down", given["experts.down_proj"]),
            *((f"shared.{part}", given[f"shared_experts.{part}_proj.weight"]) for part in ("gate", "up", "down")),
        ):  # fmt: skip
            moe.get_parameter(name).copy_(value)
        if router.get("bias"):
            bias = 0.3 * torch.randn(8, generator=torch.Generator().manual_seed(5))
            moe.router_bias.copy_(bias)
            theirs.get_buffer("gate.e_score_correction_bias").copy_(bias)
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(6))
        wanted = x + theirs(F.rms_norm(x, (32,), eps=1e-6))
        torch.testing.assert_close(ours.blocks[0](x), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("router", [{}, {"score": "sigmoid", "bias": True, "normalize": True}], ids=["softmax", "bias"])
def test_no_token_depends_on_later_tokens_or_other_rows(router: dict[str, Any], tmp_path: Path) -> None:
    """All sizes of a change: one token, a whole row, and so many tokens of one expert that others would be dropped."""
    with float64(), torch.no_grad():
        model = pair(tiny(layers=(ATTENTION, {**MOE, "router": router}), fuse=()), tmp_path).model
        generator = torch.Generator().manual_seed(3)
        ids, targets = torch.randint(11, (2, 4, 12), generator=generator)
        scores = model.score(ids, targets)
        for row, first, value in ((0, 11, None), (1, 5, None), (2, 0, 7), (3, 1, 3)):
            changed = ids.clone()
            rest = changed[row, first:]
            rest.copy_((rest + 1) % 11 if value is None else torch.full_like(rest, value))
            moved = (model.score(changed, targets) - scores).abs()
            assert moved[row, first:].max() > 1e-6
            moved[row, first:] = 0
            assert moved.max() < 1e-12


def test_losses_equal_their_definitions_and_add_their_gradients(tmp_path: Path) -> None:
    """The gradient of the router with each weight alone, against autograd through losses that are written out."""
    data = spec_data(layers=({**MOE, "router": {"score": "sigmoid"}},), fuse=(), count=1)
    data["train"]["losses"] = TERMS
    with float64():
        model = filled(instantiate(spec_of(data), "cpu", tmp_path).model.double(), 2)
        moe = model.blocks[0].moe
        ids, targets = torch.randint(11, (2, 3, 12), generator=torch.Generator().manual_seed(1))

        def gradient(*weights: float) -> Tensor:
            loss = model(ids, targets, *(torch.tensor(weight, dtype=torch.float64) for weight in weights))
            return torch.autograd.grad(loss, moe.router)[0]

        plain = gradient(0, 0, 0)
        h = F.rms_norm(F.embedding(ids, model.embed.token), (8,), eps=1e-6)
        logits = h @ moe.router.T
        p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        chosen = F.one_hot(logits.topk(2).indices, 4).double().sum(2) / 2
        losses = (
            4 * (chosen.mean((0, 1)) * p.mean((0, 1))).sum(),
            4 * (chosen.mean(1) * p.mean(1)).sum(-1).mean(),
            logits.exp().sum(-1).log().square().mean(),
        )
        for i, loss in enumerate(losses):
            weights = [0.7 if j == i else 0.0 for j in range(3)]
            (wanted,) = torch.autograd.grad(0.7 * loss, moe.router, retain_graph=True)
            assert wanted.abs().max() > 1e-4
            torch.testing.assert_close(gradient(*weights) - plain, wanted, rtol=1e-9, atol=1e-12)


def test_zero_weights_leave_the_plain_loss_and_gradients(tmp_path: Path) -> None:
    """Bit for bit."""
    plain = spec_data(layers=(ATTENTION, MOE), fuse=())
    weighted = {**plain, "train": {**plain["train"], "losses": TERMS}}
    results = []
    for i, data in enumerate((plain, weighted)):
        model = filled(instantiate(spec_of(data), "cpu", tmp_path / str(i)).model, 2)
        ids, targets = torch.randint(11, (2, 3, 12), generator=torch.Generator().manual_seed(1))
        loss = model(ids, targets, *(torch.zeros(()) for _ in LOSSES[: 3 * i]))
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_gradient_of_the_bias_is_the_load_less_its_mean(tmp_path: Path) -> None:
    router = {"score": "sigmoid", "bias": True}
    with float64():
        model = pair(tiny(layers=({**MOE, "router": router},), count=1, fuse=()), tmp_path).model
        moe = model.blocks[0].moe
        ids, targets = torch.randint(11, (2, 3, 12), generator=torch.Generator().manual_seed(1))
        (gradient,) = torch.autograd.grad(model(ids, targets), moe.router_bias)
        h = F.rms_norm(F.embedding(ids, model.embed.token), (8,), eps=1e-6)
        chosen = ((h @ moe.router.T).sigmoid() + moe.router_bias).topk(2).indices
        load = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
        assert load.max() > 1.2 * load.min()
        torch.testing.assert_close(gradient, load.double() - 0.25, rtol=1e-6, atol=1e-7)


def test_compiled_training_is_one_graph_of_any_load(tmp_path: Path) -> None:
    """Equal to eager, with gradients, and not compiled again if other experts are chosen."""
    router = {"score": "sigmoid", "bias": True, "normalize": True}
    model = filled(only_experts(tmp_path, router=router), 3)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        ids, targets = torch.randint(11, (2, 3, 12), generator=torch.Generator().manual_seed(seed))
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            loss = compiled(ids, targets)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        wanted = torch.autograd.grad(model(ids, targets), list(model.parameters()))
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_the_router_is_in_f32_where_the_model_is_not() -> None:
    spec = tiny(layers=(ATTENTION, {**MOE, "router": {"bias": True}}), fuse=(), targets=("sm90",))
    types = {param.name.rpartition(".")[2]: param.dtype for param in pipeline.lower(spec, "sm90").params}
    assert (types["router"], types["router_bias"], types["up"]) == ("f32", "f32", "bf16")
