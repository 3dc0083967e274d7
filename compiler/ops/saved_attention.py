"""Attention as kernels compute it: with the log-sum-exp, which its gradient reads.

The fusion pass replaces the ops of `attention` that train by these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import (
    Gradients,
    Op,
    Sizes,
    Tape,
    TensorType,
    TypeRuleError,
    output_ref,
)
from specc.compiler.ops.attention import Attention, ScoreFields, Sdpa, SdpaSeen

if TYPE_CHECKING:
    from torch import Tensor


SCORES = 1 << 24  # number of scores that a reference holds at a time


@dataclass(frozen=True, slots=True)
class SavedAttention(Op):
    """Base of attention as kernels compute it, with the log-sum-exp that its gradient reads.

    Outputs are y [B, T, H, C] and lse f32[B, H, T]: the natural logarithm of the sum of exp(q k^T / sqrt(C)) over the
    keys that a query attends to. If there is no such key, y, lse and all gradients are 0. All kernels use this
    definition, so that the forward and the gradient can come from different kernels.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 2  # two products in sequence: the scores, then the weights times the values
    output_labels: ClassVar[tuple[str, ...]] = ("y", "lse")

    @property
    def plain(self) -> Attention:
        """The attention without the log-sum-exp, which has the same inputs."""
        raise TypeRuleError(f"{self.name} has no attention")

    @property
    def by_rows(self) -> int:
        """The number of inputs that have rows. The others are parameters."""
        return self.arity

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, _heads_size(inputs[0], inputs[1])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (q,) = self.plain.infer(inputs)
        return q, _lse_type(q)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return self.plain.flops(inputs, outputs, sizes)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Computes some sequences at a time. lse is computed from scores in the precision of q, in f32 or wider."""
        import torch

        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        outputs = []
        for some in _by_sequences(inputs, self.by_rows, inputs[0], inputs[1]):
            scores, blind = self.plain.logits(*some)
            lse = scores.to(wide).logsumexp(-1).masked_fill(blind.squeeze(-1), 0.0)
            outputs.append((self.plain.reference(*some), lse))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    def gradients(self, tape: Tape, grad: Op) -> Gradients:
        """Adds the node of the gradient `grad`. Further inputs that have rows, such as a mask, have no gradient."""
        read = (*map(tape.input, range(3)), tape.output(0), tape.output(1), *map(tape.input, range(3, self.arity)))
        dq = tape.add("grad", grad, (tape.grad(), *read))
        learned = (output_ref(dq, i) for i in range(3, 3 + self.arity - self.by_rows))
        return dq, output_ref(dq, 1), output_ref(dq, 2), *[None] * (self.by_rows - 3), *learned


@dataclass(frozen=True, slots=True)
class SavedAttentionGrad(Op):
    """Base of the gradients dq, dk and dv of `forward`, from dy, q, k, v, y, lse and its further inputs.

    With p = exp(q k^T / sqrt(C) - lse) and ds = p (dy v^T - sum(dy y)): dv = p^T dy, dq = ds k / sqrt(C), dk = ds^T q /
    sqrt(C). The gradients of query heads that share a key head are added.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    gradient: ClassVar[bool] = True
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 3  # scores, gradient of the weights, its product with keys or queries

    @property
    def forward(self) -> SavedAttention:
        """The op whose gradients these are."""
        raise TypeRuleError(f"{self.name} has no forward")

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv"

    @property
    def words(self) -> str:
        return f"gradient of {self.forward.words}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        name, size = self.forward.symbol(inputs[1:3])
        return f"{name}_grad", size

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, q, k, v, y, lse, *mask = inputs
        self.forward.infer((q, k, v, *mask))
        if (dy, y, lse) != (q, q, _lse_type(q)):
            raise TypeRuleError(f"takes the gradient {dy} of {y} with {lse} for q {q}", (0, 4, 5))
        learned = mask[self.forward.by_rows - 3 :]
        return q, k, v, *(replace(type, dtype="f32") for type in learned)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        # five products instead of the forward's two: the scores again, then two for each of the two forward products
        return self.forward.flops(inputs[1:4], outputs, sizes) * 5 // 2

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Replaces y and lse by the outputs of the forward for q, k and v."""
        dy, q, k, v, _, _, *mask = inputs
        y, lse = self.forward.reference(q.float(), k.float(), v.float(), *mask)
        return dy, q, k, v, y.to(q.dtype), lse, *mask

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Differentiates the reference of the plain attention by autograd, some sequences at a time."""
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


@dataclass(frozen=True, slots=True)
class CausalAttention(SavedAttention):
    """Sdpa without a window, with its log-sum-exp."""

    name: ClassVar[str] = "causal_attention"
    words: ClassVar[str] = "causal attention"
    arity: ClassVar[int] = 3
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    @property
    def plain(self) -> Attention:
        return Sdpa()

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, CausalAttentionGrad())


@dataclass(frozen=True, slots=True)
class CausalAttentionGrad(SavedAttentionGrad):
    """The gradients of CausalAttention."""

    name: ClassVar[str] = "causal_attention_grad"
    arity: ClassVar[int] = 6

    @property
    def forward(self) -> SavedAttention:
        return CausalAttention()


@dataclass(frozen=True, slots=True)
class ScoredAttention(ScoreFields, SavedAttention):
    """Sdpa with any score and mask, with its log-sum-exp, to which a sink belongs.

    The inputs after q, k and v are the further inputs of `ScoreFields`. A query that attends to no key has the sink as
    its log-sum-exp, if there is one.
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
        return f"{self.name}_{self.title}", _heads_size(inputs[0], inputs[1])

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return IDS

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Replaces random ids by starts of documents."""
        return [starts_of(x) if self.documents and i == 3 else x for i, x in enumerate(inputs)]

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, ScoredAttentionGrad(self.score, self.mask, self.scale, self.tables, self.sinks))


@dataclass(frozen=True, slots=True)
class ScoredAttentionGrad(ScoreFields, SavedAttentionGrad):
    """The gradients of ScoredAttention: dq, dk, dv, then f32 those of the sinks and of the tables.

    With dscore as ds in `SavedAttentionGrad`: the gradient of s is dscore times the derivative of the score by s, that
    of an element of a table is the sum of dscore times the derivative by it over the scores that read it, and that of a
    sink is -sum(exp(sink - lse) sum(dy y)).
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

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        started = [starts_of(x) if self.documents and i == 6 else x for i, x in enumerate(inputs)]
        dy, q, k, v, _, _, *further = started
        y, lse = self.forward.reference(*(x.float() if x.is_floating_point() else x for x in (q, k, v, *further)))
        return dy, q, k, v, y.to(q.dtype), lse, *further

    @property
    def forward(self) -> SavedAttention:
        return ScoredAttention(self.score, self.mask, self.scale, self.tables, self.sinks)


@dataclass(frozen=True, slots=True)
class SeenAttention(SavedAttention):
    """SdpaSeen with its log-sum-exp."""

    name: ClassVar[str] = "seen_attention"
    words: ClassVar[str] = "attention to what is seen"
    arity: ClassVar[int] = 4
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seen")

    @property
    def plain(self) -> Attention:
        return SdpaSeen()

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        """Attention of one sequence to another has a different name, because a plan selects its kernel separately."""
        q, k = inputs[:2]
        return "seen_attention" if q.shape[1] == k.shape[1] else "cross_attention", _heads_size(q, k)

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, SeenAttentionGrad())


@dataclass(frozen=True, slots=True)
class SeenAttentionGrad(SavedAttentionGrad):
    """The gradients of SeenAttention."""

    name: ClassVar[str] = "seen_attention_grad"
    arity: ClassVar[int] = 7

    @property
    def forward(self) -> SavedAttention:
        return SeenAttention()

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2


IDS = 20  # the mean length of random documents


def starts_of(ids: "Tensor") -> "Tensor":
    """Returns the start position of each token's document i64[B, T], where a document starts at each id 0."""
    import torch

    return torch.where(ids == 0, torch.arange(ids.shape[1], device=ids.device), 0).cummax(1).values


SeenOp = SeenAttention | SeenAttentionGrad


def _lse_type(q: TensorType) -> TensorType:
    rows, tokens, heads, _ = q.shape
    return TensorType((rows, heads, tokens), "f32")


def _heads_size(q: TensorType, k: TensorType) -> str:
    return f"h{q.shape[-2]}_g{k.shape[-2]}_c{q.width}"


def _by_sequences(values: "Sequence[Tensor]", rows: int, q: "Tensor", k: "Tensor") -> "Iterator[Sequence[Tensor]]":
    """Yields slices of the first `rows` values with as many sequences as fit SCORES scores, and the other values.

    Yields one empty slice if there are none.
    """
    step = max(1, SCORES // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
    for i in range(0, max(1, len(q)), step):
        yield [value[i : i + step] if place < rows else value for place, value in enumerate(values)]
