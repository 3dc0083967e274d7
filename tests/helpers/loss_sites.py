"""Samples for the tests of the softmax loss: sites, inputs, float64 references, and buffers with guards."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from kernel_sites import DTYPES, GUARD
from torch import Tensor

from specc.compiler.ir.graph import Dim, Node, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.targets import TARGETS

CAP = "30 * tanh(z / 30)"
WEIGHTED = "next_weight * nats + z_weight * lse ** 2"
WEIGHTS = {"next_weight": 0.75, "z_weight": 0.03}
FUNCTIONS = {"plain": "z", "capped": CAP, "scaled": "0.5 * z", "odd": "where(z > 1, 2 * z - 1, z)"}


def loss_site(
    vocab: int,
    width: int = 0,
    f: str = "z",
    reduction: str = "mean",
    target: str = "sm90",
    dtype: str = "bf16",
    rows: tuple[Dim, ...] = ("T",),
    weighted: bool = False,
) -> Site:
    """A site of logits of `width` columns, by default the vocabulary's; `weighted` with a z-loss."""
    terms = (WEIGHTED, tuple(WEIGHTS)) if weighted else ("nats", ())
    op = SoftmaxLoss(vocab, reduction, f, *terms)  # type: ignore[arg-type]
    types = (TensorType((*rows, width or vocab), dtype), TensorType(rows, "i64"))
    types += tuple(TensorType((), "f32") for _ in op.weights)
    inputs = ("logits", "targets", *op.weights)
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
    weights = [torch.tensor(WEIGHTS[name], device=device) for name in op.weights]
    return [logits.to(DTYPES[site.inputs[0].dtype]), targets, *weights]


def expected(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Nats of each row, and with the mean its gradient, in float64."""
    op = op_of(site)
    logits, targets, *weights = inputs[0].double(), *inputs[1:]
    weights = [weight.double() for weight in weights]
    nats = replace(op, reduction="none").reference(logits, targets, *weights)
    assert isinstance(nats, Tensor)
    if op.reduction == "none":
        return [nats]
    loss, grad = op.reference(logits, targets, *weights)
    torch.testing.assert_close(loss, nats.mean())
    return [nats, grad]


def eager(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The cross-entropy of Torch in f32, with its gradient rounded to the dtype of the logits."""
    op = op_of(site)
    logits = inputs[0].detach().clone().requires_grad_()
    z = logits[:, : op.vocab].float()
    f = {"z": z, CAP: 30 * torch.tanh(z / 30)}[op.f]
    nats = torch.nn.functional.cross_entropy(f, inputs[1], reduction="none")
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
