"""Cross-entropy loss, on logits and fused with a pointwise function of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specc.compiler.expr import name_of, reread, torch_value
from specc.compiler.expr.values import Binary, Const, Expr, Var
from specc.compiler.ir.graph import (
    ADDED,
    Gradients,
    Input,
    Op,
    Scaled,
    Sizes,
    Tape,
    TensorType,
    TorchCall,
    TypeRuleError,
)
from specc.compiler.ops.shape import Moves

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 1 << 11  # rows of logits that a reference computes at a time


@dataclass(frozen=True, slots=True)
class CrossEntropy(Op):
    """The loss -log softmax(logits)[target] in nats, for logits f32[B, T, V] and targets i64[B, T].

    With `reduction` "mean" the output is f32[], with "none" f32[B, T]. Targets equal to `ignore` are excluded from the
    mean, and their loss is 0 with "none". The mean may be of another function of each token, `per_token`: an expression
    over `nats`, `lse` = log(sum(exp(logits))), and `weights`, which are further inputs, each f32[].
    """

    name: ClassVar[str] = "cross_entropy"
    reduction: Literal["mean", "none"]
    ignore: int | None = None
    per_token: str = "nats"
    weights: tuple[str, ...] = ()

    @property
    def arity(self) -> int:
        return 2 + len(self.weights)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        logits, targets, *_ = inputs
        if logits.shape[:-1] != targets.shape:
            raise TypeRuleError(f"needs one target per row of {logits}, not {targets}", (0, 1))
        return (TensorType(targets.shape if self.reduction == "none" else (), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        ignored = () if self.ignore is None else (("ignore_index", self.ignore),)
        if self.per_token != "nats":
            return self._weighted_call()
        if self.reduction == "mean":
            rows = TorchCall(".flatten", (Input(0), 0, 1)), TorchCall(".flatten", (Input(1),))
            return TorchCall("F.cross_entropy", rows, ignored)
        transposed = TorchCall(".transpose", (Input(0), 1, 2))
        return TorchCall("F.cross_entropy", (transposed, Input(1)), (*ignored, ("reduction", "none")))

    def _weighted_call(self) -> TorchCall:
        ignored = () if self.ignore is None else (("ignore_index", self.ignore),)
        transposed = TorchCall(".transpose", (Input(0), 1, 2))
        values: dict[str, object] = {
            "nats": TorchCall("F.cross_entropy", (transposed, Input(1)), (*ignored, ("reduction", "none"))),
            "lse": TorchCall("torch.logsumexp", (Input(0), -1)),
            **{name: Input(2 + i) for i, name in enumerate(self.weights)},
        }
        loss = _call_of(reread(self.per_token), values)
        if self.ignore is not None:  # cross_entropy is 0 at such targets, and lse is not
            loss = TorchCall("[]", (loss, TorchCall("!=", (Input(1), self.ignore))))
        return TorchCall(".mean", (loss,))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        logits, targets, *weights = inputs
        lse = logits.logsumexp(-1)
        nats = lse - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        counted = targets == targets if self.ignore is None else targets != self.ignore
        if self.reduction == "none":
            return nats * counted
        values = {"nats": nats, "lse": lse, **dict(zip(self.weights, weights, strict=True))}
        return torch_value(reread(self.per_token), values)[counted].mean()


def _call_of(expr: Expr, values: Mapping[str, object]) -> object:
    """Returns an expression of sums, products and powers as Torch calls."""
    match expr:
        case Var(name):
            return values[name]
        case Const(value):
            return int(value) if value == int(value) else value
        case Binary(operator, a, b):
            return TorchCall(operator, (_call_of(a, values), _call_of(b, values)))
    raise TypeRuleError(f"{expr} is no sum of weighted losses")


@dataclass(frozen=True, slots=True)
class SoftmaxLoss(Op):
    """The loss -log softmax(f(z))[target] in nats, for logits z [..., W] and targets i64[...].

    It is computed in f32 or wider. `f` is an expression over `z`. Only the first `vocab` of the W columns are logits;
    the others are padding. With `reduction` "mean", a second output `grad` is the gradient of the mean, with the type
    and shape of the logits and 0 in the padding, so that loss and gradient need only one pass over the logits.
    `per_token` and `weights` are as in CrossEntropy; `per_token` is linear in `nats`.
    """

    name: ClassVar[str] = "softmax_loss"
    planned: ClassVar[bool] = True
    work: ClassVar[str] = "softmax and loss"
    rowwise: ClassVar[bool] = True
    vocab: int
    reduction: Literal["mean", "none"]
    f: str = "z"
    per_token: str = field(default="nats", metadata=ADDED)
    weights: tuple[str, ...] = field(default=(), metadata=ADDED)
    title: str = field(default="", metadata=ADDED)  # of `f` in kernel names, if it is not that of its functions

    @property
    def arity(self) -> int:
        return 2 + len(self.weights)

    @property
    def input_labels(self) -> tuple[str, ...]:
        return ("logits", "targets", *self.weights) if self.weights else ()

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("loss", "grad") if self.reduction == "mean" else ()

    @property
    def words(self) -> str:
        shown = f", `{self.f}`" if self.f != "z" else ""
        shown += f", `{self.per_token}`" if self.per_token != "nats" else ""
        return f"{self.name}{shown}, {'mean' if self.reduction == 'mean' else 'one per token'}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        kind = "softmax_loss" if self.reduction == "mean" else "softmax_nats"
        words = ("weighted" if self.per_token != "nats" else "", kind, self.title or name_of(reread(self.f)))
        return "_".join(filter(None, words)), f"v{self.vocab}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        logits, targets, *_ = inputs
        if logits.shape[:-1] != targets.shape:
            raise TypeRuleError(f"needs one target per row of {logits}, not {targets}", (0, 1))
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
            return self._losses(*some)
        with torch.enable_grad():
            free = some[0].detach().requires_grad_()
            share = self._losses(free, *some[1:]).sum() / every[1].numel()
            (grad,) = torch.autograd.grad(share, free)
        rows = (torch.split(value.flatten(0, every[1].dim() - 1), ROWS) for value in every[:2])
        weights = [weight.to(grad.dtype) for weight in every[2:]]
        losses = [self._losses(logits.to(grad.dtype), targets, *weights) for logits, targets in zip(*rows, strict=True)]
        return torch.cat(losses).mean(), grad

    def _losses(self, logits: "Tensor", targets: "Tensor", *weights: "Tensor") -> "Tensor":
        import torch

        wide = logits[..., : self.vocab].to(torch.promote_types(logits.dtype, torch.float32))
        bounded = torch_value(reread(self.f), {"z": wide})
        lse = bounded.logsumexp(-1)
        nats = lse - bounded.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        values = {"nats": nats, "lse": lse, **dict(zip(self.weights, weights, strict=True))}
        return torch_value(reread(self.per_token), values)

    def derivative(self, tape: Tape) -> Gradients | None:
        if self.reduction == "none":
            return None
        return Scaled(tape.output(1), tape.grad()), None, *(None for _ in self.weights)


@dataclass(frozen=True, slots=True)
class MeanSquare(Op):
    """The mean of the squares of all elements, f32[]."""

    name: ClassVar[str] = "mean_square"
    arity: ClassVar[int] = 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        wide = Input(0) if inputs[0].dtype == "f32" else TorchCall(".float", (Input(0),))
        return TorchCall(".mean", (TorchCall(".square", (wide,)),))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].flatten().dot(inputs[0].flatten()) / inputs[0].numel()


@dataclass(frozen=True, slots=True)
class AttachLoss(Moves):
    """The first input x, unchanged. The backward pass adds the gradient of `weight` * `loss`, both f32[].

    So a loss inside a block needs no path to the loss of the program (as in DeepSeek-AI 2024, arXiv 2405.04434).
    """

    name: ClassVar[str] = "attach_loss"
    arity: ClassVar[int] = 3
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, loss, weight = inputs
        if (loss, weight) != (SCALAR, SCALAR):
            raise TypeRuleError(f"attaches a loss {loss} by a weight {weight}; both are {SCALAR}", (1, 2))
        return (x,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("attach_loss", (Input(0), Input(1), Input(2)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x, loss, weight = inputs
        from torch.autograd import Function

        class Attached(Function):
            @staticmethod
            def forward(ctx: Any, x: "Tensor", loss: "Tensor") -> "Tensor":
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: "Tensor") -> "tuple[Tensor, Tensor]":
                return grads[0], weight.to(loss.dtype)

        result: Tensor = Attached.apply(x, loss)  # type: ignore[no-untyped-call]
        return result


SCALAR = TensorType((), "f32")
