"""The cross-entropy loss of logits, alone and fused with a pointwise function of the logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from specc.compiler.expr import name_of, reread, torch_value
from specc.compiler.expr.values import Binary, Const, Expr, Var
from specc.compiler.ir.op import ADDED, Gradients, Op, Scaled, SupportCall, Tape
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record

ROWS = 1 << 11  # the number of rows of logits that a reference processes at a time


@record
class CrossEntropy(Op):
    """The loss -log softmax(logits)[target] in nats, for logits f32[B, T, V] and targets i64[B, T].

    The output is f32[] with `reduction` "mean", and f32[B, T] with "none". Targets equal to `ignore` are excluded from
    the mean, and their loss is 0 with "none".

    `per_token` is the expression of a token's loss. The expression may read `nats`, the loss above; `lse`, which is
    log(sum(exp(logits))); and the names in `weights`. `further` lists the names of additional targets. For an
    additional target `n`, the expression may read the loss `nats_n`, which is 0 where the target is negative. The
    inputs after the targets are the additional targets, i64[B, T] each, then the `weights`, f32[] each.
    """

    name: ClassVar[str] = "cross_entropy"
    reduction: Literal["mean", "none"]
    ignore: int | None = None
    per_token: str = "nats"
    weights: tuple[str, ...] = ()
    further: tuple[str, ...] = ()

    @property
    def arity(self) -> int:
        return 2 + len(self.further) + len(self.weights)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        targets = _targets(inputs, len(self.further))
        return (TensorType(targets.shape if self.reduction == "none" else (), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        ignored = () if self.ignore is None else (("ignore_index", self.ignore),)
        if self.reduction == "mean" and self.per_token == "nats":
            rows = TorchCall(".flatten", (Input(0), 0, 1)), TorchCall(".flatten", (Input(1),))
            return TorchCall("F.cross_entropy", rows, ignored)
        transposed = TorchCall(".transpose", (Input(0), 1, 2))
        nats = TorchCall("F.cross_entropy", (transposed, Input(1)), (*ignored, ("reduction", "none")))
        return nats if self.per_token == "nats" else self._weighted(nats, transposed)

    def _weighted(self, nats: TorchCall, transposed: TorchCall) -> TorchCall:
        values: dict[str, object] = {
            "nats": nats,
            "lse": TorchCall("torch.logsumexp", (Input(0), -1)),
            **{name: Input(2 + len(self.further) + i) for i, name in enumerate(self.weights)},
        }
        for i, name in enumerate(self.further):
            words = (("ignore_index", -1), ("reduction", "none"))
            values[f"nats_{name}"] = TorchCall("F.cross_entropy", (transposed, Input(2 + i)), words)
        loss = _call_of(reread(self.per_token), values)
        if self.ignore is not None:  # at ignored targets, cross_entropy is 0, but lse is not
            loss = TorchCall("[]", (loss, TorchCall("!=", (Input(1), self.ignore))))
        return TorchCall(".mean", (loss,))

    def reference(self, *inputs: Tensor) -> Tensors:
        logits, targets, *others = inputs
        further, weights = others[: len(self.further)], others[len(self.further) :]
        lse = logits.logsumexp(-1)
        counted = targets == targets if self.ignore is None else targets != self.ignore
        nats = lse - logits.gather(-1, targets.where(counted, 0).unsqueeze(-1)).squeeze(-1)
        if self.reduction == "none":
            return nats * counted
        values = {"nats": nats, "lse": lse, **dict(zip(self.weights, weights, strict=True))}
        for name, ahead in zip(self.further, further, strict=True):
            chosen = logits.gather(-1, ahead.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            values[f"nats_{name}"] = (lse - chosen).where(ahead >= 0, 0)
        return torch_value(reread(self.per_token), values)[counted].mean()


def _targets(inputs: Sequence[TensorType], further: int) -> TensorType:
    logits, *targets = inputs[: 2 + further]
    for i, type in enumerate(targets, 1):
        if type.shape != logits.shape[:-1]:
            raise TypeRuleError(f"needs one target per row of {logits}, not {type}", (0, i))
    return targets[0]


IGNORED = -1  # a target that does not count toward the loss


@record
class IgnoreFirst(Moves):
    """Replaces the first `count` targets of each row of i64[B, T] by `value`."""

    name: ClassVar[str] = "ignore_first"
    count: int
    value: int

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        later = TorchCall("[]", (Input(0), (slice(None), slice(self.count, None))))
        return TorchCall("F.pad", (later, (self.count, 0)), (("value", self.value),))

    def reference(self, *inputs: Tensor) -> Tensors:
        targets = inputs[0].clone()
        targets[:, : self.count] = self.value
        return targets


def _call_of(expr: Expr, values: Mapping[str, object]) -> object:
    match expr:
        case Var(name):
            return values[name]
        case Const(value):
            return int(value) if value == int(value) else value
        case Binary(operator, a, b):
            return TorchCall(operator, (_call_of(a, values), _call_of(b, values)))
    raise TypeRuleError(f"{expr} is not a sum of weighted losses")


@record
class SoftmaxLoss(Op):
    """The loss -log softmax(f(z))[target] in nats, for logits z [..., W] and targets i64[...]. The loss is computed in
    f32 or wider.

    `f` is an expression of `z`. Only the first `vocab` of the W columns are logits; the other columns are padding. With
    `reduction` "mean", a second output `grad` is the gradient of the mean, so one pass over the logits computes the
    loss and the gradient. `grad` has the type of the logits, and is 0 in the padding. `per_token`, `further` and
    `weights` are as in CrossEntropy, but `per_token` must be linear in the losses of the targets.
    """

    name: ClassVar[str] = "softmax_loss"
    planned: ClassVar[bool] = True
    work: ClassVar[str] = "softmax and loss"
    rowwise: ClassVar[bool] = True
    by_chunks: ClassVar[bool] = True
    vocab: int
    reduction: Literal["mean", "none"]
    f: str = "z"
    per_token: str = field(default="nats", metadata=ADDED)
    weights: tuple[str, ...] = field(default=(), metadata=ADDED)
    # The name of `f` in kernel names. If empty, the names of the functions in `f` are used.
    title: str = field(default="", metadata=ADDED)
    further: tuple[str, ...] = field(default=(), metadata=ADDED)

    @property
    def arity(self) -> int:
        return 2 + len(self.further) + len(self.weights)

    @property
    def targets(self) -> tuple[str, ...]:
        return ("targets", *(f"targets_{name}" for name in self.further))

    @property
    def input_labels(self) -> tuple[str, ...]:
        return ("logits", *self.targets, *self.weights) if self.further or self.weights else ()

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
        logits, targets = inputs[0], _targets(inputs, len(self.further))
        if not isinstance(logits.width, int) or logits.width < self.vocab:
            raise TypeRuleError(f"takes {self.vocab} logits but {{input}} gives {logits.width}", (0,))
        if self.reduction == "none":
            return (TensorType(targets.shape, "f32"),)
        return TensorType((), "f32"), logits

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return self.vocab

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return (8 if self.reduction == "mean" else 4) * inputs[0].count(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        return self.sampled(inputs, inputs)

    def sampled(self, some: Sequence[Tensor], every: Sequence[Tensor], sums: Sequence[int] = ()) -> Tensors:
        """Returns the mean loss over the rows `every`, and the gradients of the rows `some`. With `reduction` "none",
        returns only the losses of the rows `some`. To limit memory, the method processes `ROWS` rows at a time. `sums`
        has no effect."""
        import torch

        if self.reduction == "none":
            return self._losses(*some)
        with torch.enable_grad():
            free = some[0].detach().requires_grad_()
            share = self._losses(free, *some[1:]).sum() / every[1].numel()
            (grad,) = torch.autograd.grad(share, free)
        count = 2 + len(self.further)
        rows = (torch.split(value.flatten(0, every[1].dim() - 1), ROWS) for value in every[:count])
        weights = [weight.to(grad.dtype) for weight in every[count:]]
        losses = [self._losses(z.to(grad.dtype), *targets, *weights) for z, *targets in zip(*rows, strict=True)]
        return torch.cat(losses).mean(), grad

    def _losses(self, logits: Tensor, *others: Tensor) -> Tensor:
        import torch

        (targets, *further), weights = others[: len(self.targets)], others[len(self.targets) :]
        wide = logits[..., : self.vocab].to(torch.promote_types(logits.dtype, torch.float32))
        bounded = torch_value(reread(self.f), {"z": wide})
        lse = bounded.logsumexp(-1)
        nats = lse - bounded.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        values = {"nats": nats, "lse": lse, **dict(zip(self.weights, weights, strict=True))}
        for name, ahead in zip(self.further, further, strict=True):
            chosen = bounded.gather(-1, ahead.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            values[f"nats_{name}"] = (lse - chosen).where(ahead >= 0, 0)
        return torch_value(reread(self.per_token), values)

    def derivative(self, tape: Tape) -> Gradients | None:
        if self.reduction == "none":
            return None
        return Scaled(tape.output(1), tape.grad()), *(None for _ in range(1, self.arity))


@record
class LaterTargets(Moves):
    """Shifts targets i64[B, T] by `distance` tokens: output t is target t + `distance`, or `fill` beyond the end of a
    row.

    `bos` is the id that begins a document. With `bos`, output t is -1 where `bos` is among the targets t, ..., t +
    `distance` - 1. Outputs that would equal `ignore` are also -1.
    """

    name: ClassVar[str] = "later_targets"
    arity: ClassVar[int] = 1
    mixes_tokens: ClassVar[bool] = True
    distance: int
    bos: int | None = None
    ignore: int | None = None
    fill: int = -1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs[0].shape) != 2:
            raise TypeRuleError(f"takes targets [B, T], not {inputs[0]}", (0,))
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        padded = TorchCall("F.pad", (Input(0), (0, self.distance)), (("value", self.fill),))
        windows = TorchCall(".unfold", (padded, 1, self.distance + 1, 1))  # [B, T, distance + 1]
        later = TorchCall(".select", (windows, -1, self.distance))
        if self.bos is not None:
            between = TorchCall("==", (TorchCall(".narrow", (windows, -1, 0, self.distance)), self.bos))
            later = TorchCall(".masked_fill", (later, TorchCall(".any", (between, -1)), -1))
        if self.ignore is not None:
            later = TorchCall(".masked_fill", (later, TorchCall("==", (later, self.ignore)), -1))
        return later

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        (targets,) = inputs
        later = torch.full_like(targets, self.fill)
        for t in range(targets.shape[1] - self.distance):
            later[:, t] = targets[:, t + self.distance]
            if self.bos is not None:
                later[(targets[:, t : t + self.distance] == self.bos).any(1), t] = -1
        return later if self.ignore is None else later.where(later != self.ignore, -1)


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

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].flatten().dot(inputs[0].flatten()) / inputs[0].numel()


def attached(x: Tensor, other: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """Returns `x` unchanged. In the backward pass, the gradient of `other` is the result of `gradient`."""
    from torch.autograd import Function

    class Attached(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            return grads[0], gradient()

    result: Tensor = Attached.apply(x, other)  # type: ignore[no-untyped-call]
    return result


class AttachLoss(SupportCall, Moves):
    """Returns the first input x unchanged. The other inputs are `loss` and `weight`, both f32[]. The backward pass adds
    the gradient of `weight` * `loss`.

    A block can therefore add an auxiliary loss without passing the auxiliary loss to the loss of the program (as in
    DeepSeek-AI 2024, arXiv 2405.04434).
    """

    name: ClassVar[str] = "attach_loss"
    arity: ClassVar[int] = 3
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, loss, weight = inputs
        if (loss, weight) != (SCALAR, SCALAR):
            raise TypeRuleError(f"needs a loss and a weight of type {SCALAR}, not {loss} and {weight}", (1, 2))
        return (x,)

    def reference(self, *inputs: Tensor) -> Tensors:
        x, loss, weight = inputs
        return attached(x, loss, lambda: weight.to(loss.dtype))


SCALAR = TensorType((), "f32")
