"""Attention with a second output, the log-sum-exp of the scores, which the gradient reads.

In training programs, the fusion pass replaces the ops of `attention` by these ops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from specc.compiler.ir.graph import output_ref
from specc.compiler.ir.op import Gradients, Op, Tape
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.attention import Attention, ScoreFields, Sdpa, SdpaSeen
from specc.compiler.records import record

SCORES = 1 << 24  # number of scores that a reference holds at a time


class SavedAttention(Op):
    """The base class of attention that also returns the log-sum-exp of the scores.

    Outputs are y [B, T, H, C] and lse f32[B, H, T], the natural logarithm of sum(exp(q k^T / sqrt(C))). The sum is
    over the keys that a query attends to. If there is no such key, y, lse and all gradients are 0. All kernels use
    this definition, so any gradient kernel can follow any forward kernel.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 2  # two sums in sequence: the scores, then the weights times the values
    output_labels: ClassVar[tuple[str, ...]] = ("y", "lse")

    @property
    def plain(self) -> Attention:
        """The attention op that has the same inputs as this op, but does not return the log-sum-exp."""
        raise TypeRuleError(f"{self.name} does not define `plain`, the same attention without the log-sum-exp")

    @property
    def by_rows(self) -> int:
        """The number of inputs with a batch dim. The remaining inputs are parameters."""
        return self.arity

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, _heads_size(*inputs[:3])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (y,) = self.plain.infer(inputs)
        return y, _lse_type(y)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return self.plain.flops(inputs, outputs, sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        outputs = []
        for some in _by_sequences(inputs, self.by_rows, inputs[0], inputs[1]):
            scores, blind = self.plain.logits(*some)
            lse = scores.to(wide).logsumexp(-1).masked_fill(blind.squeeze(-1), 0.0)
            outputs.append((self.plain.reference(*some), lse))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    def gradients(self, tape: Tape, grad: Op) -> Gradients:
        """Adds a node with the op `grad`. Returns one gradient per input. A mask and document starts have no gradient,
        so their entries are None."""
        read = (*map(tape.input, range(3)), tape.output(0), tape.output(1), *map(tape.input, range(3, self.arity)))
        dq = tape.add("grad", grad, (tape.grad(), *read))
        learned = (output_ref(dq, i) for i in range(3, 3 + self.arity - self.by_rows))
        return dq, output_ref(dq, 1), output_ref(dq, 2), *[None] * (self.by_rows - 3), *learned


class SavedAttentionGrad(Op):
    """The base class of the gradients dq, dk and dv of `forward`. Inputs are dy, q, k, v, y, lse and the additional
    inputs of `forward`.

    Let p = exp(q k^T / sqrt(C) - lse) and ds = p (dy v^T - sum(dy y)). Then dv = p^T dy, dq = ds k / sqrt(C), and dk =
    ds^T q / sqrt(C). If several query heads share a key head, dk and dv are sums over these query heads.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    gradient: ClassVar[bool] = True
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    # Three sums in sequence: the scores, the gradient of the weights, and the product of this gradient with keys or
    # queries
    chained: ClassVar[int] = 3

    @property
    def forward(self) -> SavedAttention:
        """The op whose gradient this op computes."""
        raise TypeRuleError(f"{self.name} does not define `forward`, the op whose gradient it computes")

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv"

    @property
    def words(self) -> str:
        return f"gradient of {self.forward.words}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        name, size = self.forward.symbol(inputs[1:4])
        return f"{name}_grad", size

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, q, k, v, y, lse, *mask = inputs
        if (dy, lse) != self.forward.infer((q, k, v, *mask)) or y != dy:
            raise TypeRuleError(
                f"cannot use the gradient {dy} of {y} with {lse} for q {q}: types do not match", (0, 4, 5)
            )
        learned = mask[self.forward.by_rows - 3 :]
        return q, k, v, *(replace(type, dtype="f32") for type in learned)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        # The gradient has five matrix products: the scores again, then two products for each of the two products of the
        # forward pass.
        return self.forward.flops(inputs[1:4], (inputs[4],), sizes) * 5 // 2

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        dy, q, k, v, _, _, *mask = inputs
        y, lse = self.forward.reference(q.float(), k.float(), v.float(), *mask)
        return dy, q, k, v, y.to(q.dtype), lse, *mask

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        outputs, rows = [], self.forward.by_rows
        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        for dy, *values in _by_sequences((*inputs[:4], *inputs[6:]), rows + 1, inputs[1], inputs[2]):
            leaves = [value.detach().requires_grad_() for value in (*values[:3], *values[rows:])]
            with torch.enable_grad():
                y = self.forward.plain.reference(*leaves[:3], *values[3:rows], *leaves[3:])
            outputs.append(torch.autograd.grad(y, leaves, dy))
        gradients = list(zip(*outputs, strict=True))
        return *map(torch.cat, gradients[:3]), *(sum(part.to(wide) for part in parts) for parts in gradients[3:])


class CausalAttention(SavedAttention):
    """`Sdpa` with the default score and mask. The op also returns the log-sum-exp."""

    name: ClassVar[str] = "causal_attention"
    words: ClassVar[str] = "causal attention"
    arity: ClassVar[int] = 3
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    @property
    def plain(self) -> Attention:
        return Sdpa()

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, CausalAttentionGrad())


class CausalAttentionGrad(SavedAttentionGrad):
    """The gradients dq, dk and dv of CausalAttention."""

    name: ClassVar[str] = "causal_attention_grad"
    arity: ClassVar[int] = 6

    @property
    def forward(self) -> SavedAttention:
        return CausalAttention()


@record
class ScoredAttention(ScoreFields, SavedAttention):
    """`Sdpa` with any score and mask. The op also returns the log-sum-exp, which includes the sinks.

    The additional inputs of `ScoreFields` follow q, k and v. If a query attends to no key, the log-sum-exp is the
    sink.
    """

    name: ClassVar[str] = "scored_attention"

    @property
    def words(self) -> str:
        return f"attention, {self.description}"

    @property
    def arity(self) -> int:
        return 3 + len(self.further)

    @property
    def input_labels(self) -> tuple[str, ...]:
        return "q", "k", "v", *self.further

    @property
    def by_rows(self) -> int:
        return 3 + self.documents

    @property
    def plain(self) -> Attention:
        return Sdpa(self.score, self.mask, self.scale, self.tables, self.sinks)

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return f"{self.name}_{self.title}", _heads_size(*inputs[:3])

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return IDS

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [starts_of(x) if self.documents and i == 3 else x for i, x in enumerate(inputs)]

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, ScoredAttentionGrad(self.score, self.mask, self.scale, self.tables, self.sinks))


@record
class ScoredAttentionGrad(ScoreFields, SavedAttentionGrad):
    """The gradients of ScoredAttention: dq, dk and dv, then the gradients of the sinks and of the tables, in f32.

    Let dscore be ds in `SavedAttentionGrad`. The gradient of s is dscore times the derivative of the score with
    respect to s. The gradient of a table element is a sum over the scores that read it: dscore times the derivative of
    the score with respect to the element. The gradient of a sink is -sum(exp(sink - lse) sum(dy y)).
    """

    name: ClassVar[str] = "scored_attention_grad"

    @property
    def arity(self) -> int:
        return 6 + len(self.further)

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv", *(f"d{name}" for name in self.further if name != "start")

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return IDS

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        started = [starts_of(x) if self.documents and i == 6 else x for i, x in enumerate(inputs)]
        dy, q, k, v, _, _, *further = started
        y, lse = self.forward.reference(*(x.float() if x.is_floating_point() else x for x in (q, k, v, *further)))
        return dy, q, k, v, y.to(q.dtype), lse, *further

    @property
    def forward(self) -> SavedAttention:
        return ScoredAttention(self.score, self.mask, self.scale, self.tables, self.sinks)


class SeenAttention(SavedAttention):
    """`SdpaSeen`, with the log-sum-exp as an additional output."""

    name: ClassVar[str] = "seen_attention"
    words: ClassVar[str] = "attention to what is seen"
    arity: ClassVar[int] = 4
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seen")

    @property
    def plain(self) -> Attention:
        return SdpaSeen()

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        """Cross-attention and self-attention have different names, so that a plan chooses a kernel for each."""
        q, k = inputs[:2]
        return "seen_attention" if q.shape[1] == k.shape[1] else "cross_attention", _heads_size(*inputs[:3])

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, SeenAttentionGrad())


class SeenAttentionGrad(SavedAttentionGrad):
    """The gradients dq, dk and dv of SeenAttention."""

    name: ClassVar[str] = "seen_attention_grad"
    arity: ClassVar[int] = 7

    @property
    def forward(self) -> SavedAttention:
        return SeenAttention()

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2


IDS = 20  # the mean length of random documents


def starts_of(ids: Tensor) -> Tensor:
    """Returns i64[B, T]: the position at which the document of each token in `ids` begins. Each id 0 begins a
    document."""
    import torch

    return torch.where(ids == 0, torch.arange(ids.shape[1], device=ids.device), 0).cummax(1).values


SeenOp = SeenAttention | SeenAttentionGrad


def _lse_type(q: TensorType) -> TensorType:
    rows, tokens, heads, _ = q.shape
    return TensorType((rows, heads, tokens), "f32")


def _heads_size(q: TensorType, k: TensorType, v: TensorType) -> str:
    values = f"_d{v.width}" if v.width != k.width else ""
    return f"h{q.shape[-2]}_g{k.shape[-2]}_c{q.width}{values}"


def _by_sequences(values: Sequence[Tensor], rows: int, q: Tensor, k: Tensor) -> Iterator[Sequence[Tensor]]:
    """Splits a batch into parts of a few sequences, and yields the values of each part. The first `rows` tensors in
    `values` have a batch dim. Each part contains only its own sequences of these tensors, and the whole of each
    remaining tensor. A part of several sequences has at most `SCORES` attention scores of the queries q and keys k. A
    part of one sequence may have more scores. For an empty batch, the function yields one part without sequences.
    """
    step = max(1, SCORES // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
    for i in range(0, max(1, len(q)), step):
        yield [value[i : i + step] if place < rows else value for place, value in enumerate(values)]
