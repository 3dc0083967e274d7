"""Attention under a padding mask and its gradient, as kernels compute them: the forward saves the log-sum-exp."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Gradients, Op, Sizes, Tape, TensorType, TypeRuleError, output_ref
from specc.compiler.ops.attention import SdpaSeen, check_heads, heads_size, lse_type, scores_of

if TYPE_CHECKING:
    from torch import Tensor

SCORES = 1 << 24  # number of scores that a reference holds at a time


@dataclass(frozen=True, slots=True)
class SeenOp(Op):
    """Base of the forward and the gradient, which both read the mask `seen` bool[B, S]."""

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2

    def named(self, q: TensorType, k: TensorType) -> tuple[str, str]:
        """Returns the words for the op and its size in kernel names.

        Attention of one sequence to another has a different name, because a plan selects its kernel separately.
        """
        return "seen_attention" if q.shape[1] == k.shape[1] else "cross_attention", heads_size(q, k)


def _check(q: TensorType, k: TensorType, v: TensorType, seen: TensorType, at: int) -> None:
    check_heads(q, k, v)
    if seen != TensorType(k.shape[:2], "bool"):
        raise TypeRuleError(f"sees {seen} of keys {k}", (at - 2, at))


def _by_sequences(values: "Sequence[Tensor]", q: "Tensor", k: "Tensor") -> "Iterator[Sequence[Tensor]]":
    """Yields slices of `values` with as many sequences as fit SCORES scores.

    Yields one empty slice if there are none.
    """
    step = max(1, SCORES // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
    for i in range(0, max(1, len(q)), step):
        yield [value[i : i + step] for value in values]


@dataclass(frozen=True, slots=True)
class SeenAttention(SeenOp):
    """SdpaSeen with the log-sum-exp that its gradient reads.

    Outputs are y [B, T, H, C] and lse f32[B, H, T]: the natural logarithm of the sum of exp(q k^T / sqrt(C)) over the
    keys for which `seen` is True. If there is no such key, y, lse and all gradients are 0. All kernels use this
    definition, so that the forward and the gradient can come from different kernels.
    """

    name: ClassVar[str] = "seen_attention"
    chained: ClassVar[int] = 2  # two products in sequence: the scores, then the weights times the values

    @property
    def arity(self) -> int:
        return 4

    @property
    def input_labels(self) -> tuple[str, ...]:
        return "q", "k", "v", "seen"

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "y", "lse"

    @property
    def words(self) -> str:
        return "attention to what is seen"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.named(inputs[0], inputs[1])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v, seen = inputs
        _check(q, k, v, seen, 3)
        return q, lse_type(q)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return SdpaSeen().flops(inputs, outputs, sizes)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Computes some sequences at a time. lse is computed from scores in the precision of q."""
        import torch

        outputs = []
        for q, k, v, seen in _by_sequences(inputs, inputs[0], inputs[1]):
            wide = torch.promote_types(q.dtype, torch.float32)
            lse = scores_of(q, k, seen[:, None, None]).to(wide).logsumexp(-1)
            lse = lse.masked_fill(~seen.any(-1)[:, None, None], 0.0)
            outputs.append((SdpaSeen().reference(q, k, v, seen), lse))
        ys, lses = zip(*outputs, strict=True)
        return torch.cat(ys), torch.cat(lses)

    def derivative(self, tape: Tape) -> Gradients | None:
        read = (tape.grad(), *map(tape.input, range(3)), tape.output(0), tape.output(1), tape.input(3))
        dq = tape.add("grad", SeenAttentionGrad(), read)
        return dq, output_ref(dq, 1), output_ref(dq, 2), None


@dataclass(frozen=True, slots=True)
class SeenAttentionGrad(SeenOp):
    """The gradients dq, dk and dv of SeenAttention, from dy, q, k, v, y, lse and `seen`.

    The formulas are those of CausalAttentionGrad, over the keys for which `seen` is True.
    """

    name: ClassVar[str] = "seen_attention_grad"
    gradient: ClassVar[bool] = True
    chained: ClassVar[int] = 3  # scores, gradient of the weights, its product with keys or queries

    @property
    def arity(self) -> int:
        return 7

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv"

    @property
    def words(self) -> str:
        return "gradient of attention to what is seen"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        word, size = self.named(inputs[1], inputs[2])
        return f"{word}_grad", size

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, q, k, v, y, lse, seen = inputs
        _check(q, k, v, seen, 6)
        if (dy, y, lse) != (q, q, lse_type(q)):
            raise TypeRuleError(f"takes the gradient {dy} of {y} with {lse} for q {q}", (0, 4, 5))
        return q, k, v

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        # five products instead of the forward's two: the scores again, then two for each of the two forward products
        return SdpaSeen().flops(inputs[1:4], outputs, sizes) * 5 // 2

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Replaces y and lse by the outputs of the forward for q, k and v."""
        dy, q, k, v, *_, seen = inputs
        y, lse = SeenAttention().reference(*(value.float() for value in (q, k, v)), seen)
        return dy, q, k, v, y.to(q.dtype), lse, seen

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Differentiates the reference of SdpaSeen by autograd, some sequences at a time. y and lse are not read."""
        import torch

        outputs = []
        for dy, *leaves, seen in _by_sequences((*inputs[:4], inputs[6]), inputs[1], inputs[2]):
            free = [leaf.detach().requires_grad_() for leaf in leaves]
            with torch.enable_grad():
                y = SdpaSeen().reference(*free, seen)
            outputs.append(torch.autograd.grad(y, free, dy))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))
