"""Scaled dot-product attention: over a whole sequence, over a key-value cache, under a padding mask.

`Attention` and its subclasses are the ops that specs lower to. The fusion pass replaces those that train by
`SavedAttention`, which kernels compute and which saves the log-sum-exp for `SavedAttentionGrad`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Gradients, Input, Op, Sizes, Tape, TensorType, TorchCall, TypeRuleError, output_ref

if TYPE_CHECKING:
    from torch import Tensor

SCORES = 1 << 24  # number of scores that a reference holds at a time


def _scores(q: "Tensor", k: "Tensor", allowed: "Tensor") -> "Tensor":
    """Returns q k^T / sqrt(C) as [B, H, T, S], with minus infinity where `allowed` is False."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    scores: Tensor = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) / q.shape[-1] ** 0.5
    return scores.masked_fill(~allowed, float("-inf"))


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Base of attention: softmax(q k^T / sqrt(C)) v for q [B, T, H, C] and k, v [B, S, G, C], where G divides H.

    Subclasses differ in the keys that a query attends to. A query that attends to no key has output 0, as in Torch.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v = inputs[:3]
        heads, kv_heads = q.shape[-2], k.shape[-2]
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        if heads % kv_heads or k.shape != v.shape or q.width != k.width:
            raise TypeRuleError(f"attends with q {q}, k {k}, v {v}", (0, 1, 2))
        return (q,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q, k = inputs[0], inputs[1]
        return 4 * q.count(sizes) * k.with_shape(k.shape[1]).count(sizes)

    def allowed(self, *inputs: "Tensor") -> "Tensor":
        """Returns bool[T, S] with optional leading dims that broadcast to [B, H]: the keys that a query attends to."""
        raise TypeRuleError(f"{self.name} has no mask")

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        q, k, v = inputs[:3]
        allowed = self.allowed(*inputs)
        v = v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)
        blind = ~allowed.any(-1, keepdim=True)
        weights = _scores(q, k, allowed | blind).softmax(-1).masked_fill(blind, 0.0)
        attended: Tensor = weights @ v.transpose(1, 2)
        return attended.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class WindowedAttention(Attention):
    """Base of causal attention: each token attends to itself and the tokens before it.

    If `window` is set, it attends only to the last `window` of these. With `documents`, the last input i64[B, T] is the
    position at which the document of each token starts, and the token attends to nothing before that position.
    """

    window: int | None = None
    documents: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, starts = inputs[0], inputs[-1]
        if self.documents and starts.shape != q.shape[:2]:
            raise TypeRuleError(f"attends with q {q}, whose documents start at {starts}", (0, self.arity - 1))
        return Attention.infer(self, inputs)

    def within(self, row: "Tensor", column: "Tensor", *starts: "Tensor") -> "Tensor":
        """Returns the mask for queries at positions `row` [T, 1] and keys at positions `column` [S].

        `starts` is empty or one tensor [B, T]. With it the result is bool[B, 1, T, S], else bool[T, S].
        """
        allowed = (column <= row) & (row - column < (self.window or len(column)))
        return (allowed & (column >= starts[0].unsqueeze(-1))).unsqueeze(1) if starts else allowed


@dataclass(frozen=True, slots=True)
class Sdpa(WindowedAttention):
    """Causal attention over a whole sequence, from q, k, v and, with `documents`, the document starts."""

    name: ClassVar[str] = "sdpa"

    @property
    def arity(self) -> int:
        return 3 + self.documents

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q = inputs[0]
        tokens = q.with_shape(q.shape[1]).count(sizes)
        most = min(self.window or tokens, tokens)
        pairs = most * tokens - most * (most - 1) // 2  # the first tokens have fewer than `most` keys
        return 4 * q.count(sizes) // tokens * pairs

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        function = "attend" if self.window is None and not self.documents else "attend_since"
        window = () if self.window is None else (("window", self.window),)
        return TorchCall(function, tuple(map(Input, range(self.arity))), window)

    def allowed(self, *inputs: "Tensor") -> "Tensor":
        import torch

        q, k, _, *starts = inputs
        row, column = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
        return self.within(row.unsqueeze(1), column, *starts)


@dataclass(frozen=True, slots=True)
class SdpaCached(WindowedAttention):
    """Attention of q [B, T, H, C] at `positions` (i64[T]) over a key-value cache k, v [B, S, G, C].

    Cache rows after a query's position are ignored. With `documents`, the document starts are the fifth input.
    """

    name: ClassVar[str] = "sdpa_cached"

    @property
    def arity(self) -> int:
        return 4 + self.documents

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        words = ("_documents" if self.documents else "", "_window" if self.window is not None else "")
        window = () if self.window is None else (self.window,)
        return TorchCall(f"attend_cached{''.join(words)}", (*map(Input, range(self.arity)), *window))

    def allowed(self, *inputs: "Tensor") -> "Tensor":
        import torch

        _, k, _, positions, *starts = inputs
        return self.within(positions.unsqueeze(1), torch.arange(k.shape[1], device=k.device), *starts)


@dataclass(frozen=True, slots=True)
class SdpaSeen(Attention):
    """Bidirectional attention of q [B, T, H, C] over the positions of k, v [B, S, G, C] with `seen` bool[B, S] True."""

    name: ClassVar[str] = "sdpa_seen"
    arity: ClassVar[int] = 4

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        k, seen = inputs[1], inputs[3]
        if seen != TensorType(k.shape[:2], "bool"):
            raise TypeRuleError(f"masks keys {k} by {seen}", (1, 3))
        return Attention.infer(self, inputs)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("attend_seen", tuple(map(Input, range(4))))

    def allowed(self, *inputs: "Tensor") -> "Tensor":
        return inputs[3][:, None, None]


@dataclass(frozen=True, slots=True)
class SavedAttention(Op):
    """Base of attention as kernels compute it, with the log-sum-exp that its gradient reads.

    Outputs are y [B, T, H, C] and lse f32[B, H, T]: the natural logarithm of the sum of exp(q k^T / sqrt(C)) over the
    keys that a query attends to. If there is no such key, y, lse and all gradients are 0. All kernels use this
    definition, so that the forward and the gradient can come from different kernels.

    `plain` is the attention without the log-sum-exp, and has the same inputs.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 2  # two products in sequence: the scores, then the weights times the values
    output_labels: ClassVar[tuple[str, ...]] = ("y", "lse")
    plain: ClassVar[Attention]

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
        for some in _by_sequences(inputs, inputs[0], inputs[1]):
            allowed = self.plain.allowed(*some)
            lse = _scores(some[0], some[1], allowed).to(wide).logsumexp(-1).masked_fill(~allowed.any(-1), 0.0)
            outputs.append((self.plain.reference(*some), lse))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    def gradients(self, tape: Tape, grad: Op) -> Gradients:
        """Adds the node of the gradient `grad`. A mask has no gradient."""
        read = (*map(tape.input, range(3)), tape.output(0), tape.output(1), *map(tape.input, range(3, self.arity)))
        dq = tape.add("grad", grad, (tape.grad(), *read))
        return dq, output_ref(dq, 1), output_ref(dq, 2), *[None] * (self.arity - 3)


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
    output_labels: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv")
    forward: ClassVar[SavedAttention]

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
        return q, k, v

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

        outputs = []
        for dy, q, k, v, *mask in _by_sequences((*inputs[:4], *inputs[6:]), inputs[1], inputs[2]):
            leaves = [leaf.detach().requires_grad_() for leaf in (q, k, v)]
            with torch.enable_grad():
                y = self.forward.plain.reference(*leaves, *mask)
            outputs.append(torch.autograd.grad(y, leaves, dy))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))


@dataclass(frozen=True, slots=True)
class CausalAttention(SavedAttention):
    """Sdpa without a window, with its log-sum-exp."""

    name: ClassVar[str] = "causal_attention"
    words: ClassVar[str] = "causal attention"
    arity: ClassVar[int] = 3
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    plain: ClassVar[Attention] = Sdpa()

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, CausalAttentionGrad())


@dataclass(frozen=True, slots=True)
class CausalAttentionGrad(SavedAttentionGrad):
    """The gradients of CausalAttention."""

    name: ClassVar[str] = "causal_attention_grad"
    arity: ClassVar[int] = 6
    forward: ClassVar[SavedAttention] = CausalAttention()


@dataclass(frozen=True, slots=True)
class SeenAttention(SavedAttention):
    """SdpaSeen with its log-sum-exp."""

    name: ClassVar[str] = "seen_attention"
    words: ClassVar[str] = "attention to what is seen"
    arity: ClassVar[int] = 4
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seen")
    plain: ClassVar[Attention] = SdpaSeen()

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
    forward: ClassVar[SavedAttention] = SeenAttention()

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2


SeenOp = SeenAttention | SeenAttentionGrad


def _lse_type(q: TensorType) -> TensorType:
    rows, tokens, heads, _ = q.shape
    return TensorType((rows, heads, tokens), "f32")


def _heads_size(q: TensorType, k: TensorType) -> str:
    return f"h{q.shape[-2]}_g{k.shape[-2]}_c{q.width}"


def _by_sequences(values: "Sequence[Tensor]", q: "Tensor", k: "Tensor") -> "Iterator[Sequence[Tensor]]":
    """Yields slices of `values` with as many sequences as fit SCORES scores.

    Yields one empty slice if there are none.
    """
    step = max(1, SCORES // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
    for i in range(0, max(1, len(q)), step):
        yield [value[i : i + step] for value in values]


@dataclass(frozen=True, slots=True)
class CacheWrite(Op):
    """Replaces rows `positions` (i64[T]) of a cache [B, S, G, C] by x [B, T, G, C], in place."""

    name: ClassVar[str] = "cache_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    arity: ClassVar[int] = 3
    flops_per_output: ClassVar[int] = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x, _ = inputs
        if cache.shape[2:] != x.shape[2:]:
            raise TypeRuleError(f"writes {x} to a cache {cache}", (0, 1))
        return (cache,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".index_copy_", (Input(0), 1, Input(2), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        cache, x, positions = inputs
        written = cache.clone()
        for row, position in enumerate(positions.tolist()):
            written[:, position] = x[:, row]
        return written


@dataclass(frozen=True, slots=True)
class Exclusive(Op):
    """Exclusive self-attention: y - (y . u) u with u = v / |v| (XSA, arXiv 2603.09078).

    y [B, T, H, C] is the attention output and v [B, T, G, C] the value of the same token, where G divides H. Query head
    h uses value head h // (H / G). The component of y along the token's value is removed.
    """

    name: ClassVar[str] = "exclusive"
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        y, v = inputs
        heads, groups = y.shape[-2], v.shape[-2]
        assert isinstance(heads, int) and isinstance(groups, int)
        if heads % groups or y.with_shape(*y.shape[:-2], groups, y.width) != v:
            raise TypeRuleError(f"removes values {v} from outputs {y}", (0, 1))
        return (y,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes) + 3 * inputs[1].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("exclusive", (Input(0), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        y, v = inputs
        v = v.repeat_interleave(y.shape[-2] // v.shape[-2], dim=-2)
        along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True)
        return y - along * v
