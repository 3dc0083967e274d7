"""Cross-entropy loss, on logits and fused with a pointwise function of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from specc.compiler.expr import name_of, reread, torch_value
from specc.compiler.ir.graph import Gradients, Input, Op, Scaled, Sizes, Tape, TensorType, TorchCall, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 1 << 11  # rows of logits that a reference computes at a time


@dataclass(frozen=True, slots=True)
class CrossEntropy(Op):
    """The loss -log softmax(logits)[target] in nats, for logits f32[B, T, V] and targets i64[B, T].

    With `reduction` "mean" the output is f32[], with "none" f32[B, T]. Targets equal to `ignore` are excluded from the
    mean, and their loss is 0 with "none".
    """

    name: ClassVar[str] = "cross_entropy"
    arity: ClassVar[int] = 2
    reduction: Literal["mean", "none"]
    ignore: int | None = None

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        logits, targets = inputs
        if logits.shape[:-1] != targets.shape:
            raise TypeRuleError(f"scores {logits} by targets {targets}", (0, 1))
        return (TensorType(targets.shape if self.reduction == "none" else (), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        ignored = () if self.ignore is None else (("ignore_index", self.ignore),)
        if self.reduction == "mean":
            rows = TorchCall(".flatten", (Input(0), 0, 1)), TorchCall(".flatten", (Input(1),))
            return TorchCall("F.cross_entropy", rows, ignored)
        transposed = TorchCall(".transpose", (Input(0), 1, 2))
        return TorchCall("F.cross_entropy", (transposed, Input(1)), (*ignored, ("reduction", "none")))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        logits, targets = inputs
        nats = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        counted = targets == targets if self.ignore is None else targets != self.ignore
        return nats[counted].mean() if self.reduction == "mean" else nats * counted


@dataclass(frozen=True, slots=True)
class SoftmaxLoss(Op):
    """The loss -log softmax(f(z))[target] in nats, for logits z [..., W] and targets i64[...].

    It is computed in f32 or wider. `f` is an expression over `z`. Only the first `vocab` of the W columns are logits;
    the others are padding. With `reduction` "mean", a second output `grad` is the gradient of the mean, with the type
    and shape of the logits and 0 in the padding, so that loss and gradient need only one pass over the logits.
    """

    name: ClassVar[str] = "softmax_loss"
    planned: ClassVar[bool] = True
    work: ClassVar[str] = "softmax and loss"
    rowwise: ClassVar[bool] = True
    arity: ClassVar[int] = 2
    vocab: int
    reduction: Literal["mean", "none"]
    f: str = "z"

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("loss", "grad") if self.reduction == "mean" else ()

    @property
    def words(self) -> str:
        shown = f", `{self.f}`" if self.f != "z" else ""
        return f"{self.name}{shown}, {'mean' if self.reduction == 'mean' else 'one per token'}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        words = ("softmax_loss" if self.reduction == "mean" else "softmax_nats", name_of(reread(self.f)))
        return "_".join(filter(None, words)), f"v{self.vocab}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        logits, targets = inputs
        if logits.shape[:-1] != targets.shape:
            raise TypeRuleError(f"scores {logits} by targets {targets}", (0, 1))
        if not isinstance(logits.width, int) or logits.width < self.vocab:
            raise TypeRuleError(f"takes {self.vocab} logits but {{input}} gives {logits.width}", (0,))
        if self.reduction == "none":
            return (TensorType(targets.shape, "f32"),)
        return TensorType((), "f32"), logits

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return self.vocab

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return (8 if self.reduction == "mean" else 4) * inputs[0].count(sizes)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return self.sampled(inputs, inputs)

    def sampled(
        self, some: "Sequence[Tensor]", every: "Sequence[Tensor]", sums: Sequence[int] = ()
    ) -> "Tensor | tuple[Tensor, ...]":
        """Computes the gradient of some rows and the mean over all rows, ROWS rows at a time to bound memory."""
        import torch

        if self.reduction == "none":
            return self._nats(*some)
        with torch.enable_grad():
            free = some[0].detach().requires_grad_()
            share = self._nats(free, some[1]).sum() / every[1].numel()
            (grad,) = torch.autograd.grad(share, free)
        rows = (torch.split(value.flatten(0, every[1].dim() - 1), ROWS) for value in every)
        nats = [self._nats(logits.to(grad.dtype), targets) for logits, targets in zip(*rows, strict=True)]
        return torch.cat(nats).mean(), grad

    def _nats(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        import torch

        wide = logits[..., : self.vocab].to(torch.promote_types(logits.dtype, torch.float32))
        bounded = torch_value(reread(self.f), {"z": wide})
        return bounded.logsumexp(-1) - bounded.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def derivative(self, tape: Tape) -> Gradients | None:
        if self.reduction == "none":
            return None
        return Scaled(tape.output(1), tape.grad()), None
