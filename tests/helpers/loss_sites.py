"""Samples for the tests of the softmax loss: sites, inputs, float64 references, and buffers with guards."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from kernel_sites import DTYPES, GUARD
from torch import Tensor

from specc.compiler.expr import reread, torch_value
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.targets import TARGETS

CAP = "30 * tanh(z / 30)"
WEIGHTED = "next_weight * nats + z_weight * lse ** 2"
LATER = "later_2_weight * nats_2 + later_3_weight * nats_3"
WEIGHTS = {"next_weight": 0.75, "z_weight": 0.03, "later_2_weight": 0.5, "later_3_weight": 0.25}
# The loss of a token, the names of its weights, and those of its further targets.
TERMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "": ("nats", (), ()),
    "weighted": (WEIGHTED, ("next_weight", "z_weight"), ()),
    "later": (f"nats + {LATER}", ("later_2_weight", "later_3_weight"), ("2", "3")),
    "all": (f"{WEIGHTED} + {LATER}", tuple(WEIGHTS), ("2", "3")),
}
FUNCTIONS = {"plain": "z", "capped": CAP, "scaled": "0.5 * z", "odd": "where(z > 1, 2 * z - 1, z)"}


def loss_site(
    vocab: int,
    width: int = 0,
    f: str = "z",
    reduction: str = "mean",
    target: str = "sm90",
    dtype: str = "bf16",
    rows: tuple[Dim, ...] = ("T",),
    terms: str = "",
) -> Site:
    """A site of logits of `width` columns, by default the vocabulary's, and a loss of TERMS."""
    per_token, weights, further = TERMS[terms]
    op = SoftmaxLoss(vocab, reduction, f, per_token, weights, further=further)  # type: ignore[arg-type]
    types = (TensorType((*rows, width or vocab), dtype), *(TensorType(rows, "i64") for _ in op.targets))
    types += tuple(TensorType((), "f32") for _ in op.weights)
    inputs = ("logits", *op.targets, *op.weights)
    node = Node("head.loss", op, inputs, op.infer(types), None, ("head.loss", "head.softcap"))
    return Site(node, types, TARGETS[target], "head.loss + softcap", "sample")


def op_of(site: Site) -> SoftmaxLoss:
    assert isinstance(site.node.op, SoftmaxLoss)
    return site.node.op


def loss_inputs(site: Site, m: int, seed: int, device: str = "cpu", spread: float = 3.0) -> list[Tensor]:
    """Logits with a normal spread, 0 in the padding, and targets, the first and the last token among them."""
    generator = torch.Generator(device).manual_seed(seed)
    op, width = op_of(site), site.inputs[0].width
    assert isinstance(width, int)
    logits = spread * torch.randn(m, width, generator=generator, device=device)
    logits[:, op.vocab :] = 0
    targets = torch.randint(op.vocab, (m,), generator=generator, device=device)
    for i, target in enumerate((0, op.vocab - 1)):
        targets[i : i + 1] = target
    further = [torch.randint(-op.vocab // 3, op.vocab, (m,), generator=generator, device=device) for _ in op.further]
    for i, ahead in enumerate(further):
        ahead.clamp_(min=-1)  # some tokens have no such target
        ahead[i::3] = targets[i::3]  # and for some it is that of the next token
    weights = [torch.tensor(WEIGHTS[name], device=device) for name in op.weights]
    return [logits.to(DTYPES[site.inputs[0].dtype]), targets, *further, *weights]


def expected(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Nats of each row, and with the mean its gradient, in float64."""
    op = op_of(site)
    logits, targets, *others = inputs[0].double(), *inputs[1:]
    others = [value.double() if value.is_floating_point() else value for value in others]
    nats = replace(op, reduction="none").reference(logits, targets, *others)
    assert isinstance(nats, Tensor)
    if op.reduction == "none":
        return [nats]
    loss, grad = op.reference(logits, targets, *others)
    torch.testing.assert_close(loss, nats.mean())
    return [nats, grad]


def eager(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The cross-entropy of Torch in f32, with its gradient rounded to the dtype of the logits."""
    op = op_of(site)
    logits = inputs[0].detach().clone().requires_grad_()
    z = logits[:, : op.vocab].float()
    f = {"z": z, CAP: 30 * torch.tanh(z / 30)}[op.f]
    values = {"lse": f.logsumexp(-1), **dict(zip(op.weights, inputs[1 + len(op.targets) :], strict=True))}
    for name, targets in zip(("nats", *(f"nats_{n}" for n in op.further)), inputs[1:], strict=False):
        words = {"ignore_index": -1, "reduction": "none"}
        values[name] = torch.nn.functional.cross_entropy(f, targets, **words)  # type: ignore[arg-type]
    nats = torch_value(reread(op.per_token), values)
    if op.reduction == "none":
        return [nats.detach()]
    (grad,) = torch.autograd.grad(nats.mean(), logits)
    return [nats.detach(), grad]


def columns(site: Site) -> list[int]:
    """The width of what the kernel itself writes: nats, and the gradient."""
    width = site.inputs[0].width
    assert isinstance(width, int)
    return [1, width] if op_of(site).reduction == "mean" else [1]


def buffers(site: Site, m: int, device: str = "cpu") -> list[Tensor]:
    """Memory full of NaN for what the kernel writes, with a guard on either side."""
    dtypes = [torch.float32, DTYPES[site.inputs[0].dtype]]
    pairs = zip(columns(site), dtypes, strict=False)
    return [torch.full((m * n + 2 * GUARD,), torch.nan, dtype=dtype, device=device) for n, dtype in pairs]
