"""Scaled dot-product attention over a whole sequence or a key-value cache, and its gradient over a whole sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Gradients, Input, Op, Sizes, Tape, TensorType, Traced, TypeRuleError, output_ref

if TYPE_CHECKING:
    from torch import Tensor


def attended_to(q: "Tensor", k: "Tensor", v: "Tensor", allowed: "Tensor") -> "Tensor":
    """Computes softmax attention in the precision of q.

    Args:
        q: queries [B, T, H, C].
        k: keys [B, S, G, C], where G divides H.
        v: values [B, S, G, C].
        allowed: bool[T, S] with optional leading dims that broadcast to [B, H]. True where a query attends to a key.

    Returns:
        The outputs [B, T, H, C]. A query that attends to no key has output 0, as in Torch's own attention.
    """
    v = v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)
    blind = ~allowed.any(-1, keepdim=True)
    weights = scores_of(q, k, allowed | blind).softmax(-1).masked_fill(blind, 0.0)
    attended: Tensor = weights @ v.transpose(1, 2)
    return attended.transpose(1, 2)


def scores_of(q: "Tensor", k: "Tensor", allowed: "Tensor") -> "Tensor":
    """Returns q k^T / sqrt(C) as [B, H, T, S], with minus infinity where `allowed` is False."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    scores: Tensor = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) / q.shape[-1] ** 0.5
    return scores.masked_fill(~allowed, float("-inf"))


def check_heads(q: TensorType, k: TensorType, v: TensorType) -> None:
    heads, kv_heads = q.shape[-2], k.shape[-2]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads or k.shape != v.shape or q.width != k.width:
        raise TypeRuleError(f"attends with q {q}, k {k}, v {v}", (0, 1, 2))


def _check_starts(q: TensorType, starts: Sequence[TensorType], at: int) -> None:
    if any(type.shape != q.shape[:2] for type in starts):
        raise TypeRuleError(f"attends with q {q}, whose documents start at {starts[0]}", (0, at))


def _within(allowed: "Tensor", column: "Tensor", starts: "Sequence[Tensor]") -> "Tensor":
    """Restricts the mask `allowed` bool[T, S] to keys within the document of each query.

    `starts` is empty or has one tensor [B, T] of document start positions. With it the result is bool[B, 1, T, S], else
    `allowed` itself.
    """
    return (allowed & (column >= starts[0].unsqueeze(-1))).unsqueeze(1) if starts else allowed


@dataclass(frozen=True, slots=True)
class Sdpa(Op):
    """Causal attention: softmax(q k^T / sqrt(C)) v for q [B, T, H, C] and k, v [B, T, G, C], where G divides H.

    Each token attends to itself and the tokens before it. If `window` is set, it attends only to the last `window` of
    these. With `documents`, a fourth input i64[B, T] is the position at which the document of each token starts, and
    the token attends to nothing before that position.
    """

    name: ClassVar[str] = "sdpa"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    window: int | None = None
    documents: bool = False

    @property
    def arity(self) -> int:
        return 3 + self.documents

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v, *starts = inputs
        check_heads(q, k, v)
        _check_starts(q, starts, 3)
        return (q,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q = inputs[0]
        tokens = q.with_shape(q.shape[1]).count(sizes)
        most = min(self.window or tokens, tokens)
        pairs = most * tokens - most * (most - 1) // 2  # the first tokens have fewer than `most` keys
        return 4 * q.count(sizes) // tokens * pairs

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        window = () if self.window is None else (f"window={self.window}",)
        return f"{self.support(inputs)}({', '.join((*args, *window))})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "attend" if self.window is None and not self.documents else "attend_since"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        window = () if self.window is None else (("window", self.window),)
        return Traced(self.support(inputs), tuple(map(Input, range(len(inputs)))), window)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        q, k, v, *starts = inputs
        row, column = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
        row = row.unsqueeze(1)
        allowed = (column <= row) & (row - column < (self.window or q.shape[1]))
        return attended_to(q, k, v, _within(allowed, column, starts))


@dataclass(frozen=True, slots=True)
class CausalAttention(Op):
    """Sdpa without a window, with the log-sum-exp that its gradient reads.

    Outputs are y [B, T, H, C] and lse f32[B, H, T]: the natural logarithm of the sum of exp(q k^T / sqrt(C)) over the
    keys that a token attends to. All kernels use this definition, so that the forward and the gradient can come from
    different kernels.
    """

    name: ClassVar[str] = "causal_attention"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 2  # two products in sequence: the scores, then the weights times the values

    @property
    def arity(self) -> int:
        return 3

    @property
    def input_labels(self) -> tuple[str, ...]:
        return "q", "k", "v"

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "y", "lse"

    @property
    def words(self) -> str:
        return "causal attention"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, heads_size(inputs[0], inputs[1])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v = inputs
        check_heads(q, k, v)
        return q, lse_type(q)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return Sdpa().flops(inputs, outputs, sizes)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Computes one sequence at a time, because the scores of all sequences would fill the memory.

        lse is computed from scores in the precision of q, in f32 or wider.
        """
        import torch

        q, k, v = inputs
        token = torch.arange(q.shape[1], device=q.device)
        allowed = token <= token.unsqueeze(1)
        outputs = []
        for i in range(len(q)):
            sequence = q[i : i + 1], k[i : i + 1], v[i : i + 1]
            scores = scores_of(sequence[0], sequence[1], allowed)
            wide = torch.promote_types(q.dtype, torch.float32)
            outputs.append((attended_to(*sequence, allowed), scores.to(wide).logsumexp(-1)))
        ys, lses = zip(*outputs, strict=True)
        return torch.cat(ys), torch.cat(lses)

    def derivative(self, tape: Tape) -> Gradients | None:
        read = (tape.grad(), *map(tape.input, range(3)), tape.output(0), tape.output(1))
        dq = tape.add("grad", CausalAttentionGrad(), read)
        return dq, output_ref(dq, 1), output_ref(dq, 2)


@dataclass(frozen=True, slots=True)
class CausalAttentionGrad(Op):
    """The gradients dq, dk and dv of CausalAttention, from dy, q, k, v, y and lse.

    With p = exp(q k^T / sqrt(C) - lse) and ds = p (dy v^T - sum(dy y)): dv = p^T dy, dq = ds k / sqrt(C), dk = ds^T q /
    sqrt(C). The gradients of query heads that share a key head are added.
    """

    name: ClassVar[str] = "causal_attention_grad"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    gradient: ClassVar[bool] = True
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 3  # scores, gradient of the weights, its product with keys or queries

    @property
    def arity(self) -> int:
        return 6

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv"

    @property
    def words(self) -> str:
        return "gradient of causal attention"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, heads_size(inputs[1], inputs[2])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, q, k, v, y, lse = inputs
        check_heads(q, k, v)
        if (dy, y, lse) != (q, q, lse_type(q)):
            raise TypeRuleError(f"takes the gradient {dy} of {y} with {lse} for q {q}", (0, 4, 5))
        return q, k, v

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        # five products instead of the forward's two: the scores again, then two for each of the two forward products
        return Sdpa().flops(inputs[1:4], outputs, sizes) * 5 // 2

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Replaces y and lse by the outputs of the forward for q, k and v."""
        dy, q, k, v, *_ = inputs
        y, lse = CausalAttention().reference(*(value.float() for value in (q, k, v)))
        return dy, q, k, v, y.to(q.dtype), lse

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Differentiates the reference of Sdpa by autograd, one sequence at a time. y and lse are not read."""
        import torch

        outputs = []
        for i in range(len(inputs[0])):
            dy, *leaves = (value[i : i + 1].detach() for value in inputs[:4])
            free = [leaf.requires_grad_() for leaf in leaves]
            with torch.enable_grad():
                y = Sdpa().reference(*free)
            outputs.append(torch.autograd.grad(y, free, dy))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))


def lse_type(q: TensorType) -> TensorType:
    rows, tokens, heads, _ = q.shape
    return TensorType((rows, heads, tokens), "f32")


def heads_size(q: TensorType, k: TensorType) -> str:
    return f"h{q.shape[-2]}_g{k.shape[-2]}_c{q.width}"


@dataclass(frozen=True, slots=True)
class CacheWrite(Op):
    """Replaces rows `positions` (i64[T]) of a cache [B, S, G, C] by x [B, T, G, C], in place."""

    name: ClassVar[str] = "cache_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x, _ = inputs
        if cache.shape[2:] != x.shape[2:]:
            raise TypeRuleError(f"keeps {cache} but is given {x}", (0, 1))
        return (cache,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{args[0]}.index_copy_(1, {args[2]}, {args[1]})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("index_copy_", (Input(0), 1, Input(2), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        cache, x, positions = inputs
        written = cache.clone()
        for row, position in enumerate(positions.tolist()):
            written[:, position] = x[:, row]
        return written


@dataclass(frozen=True, slots=True)
class SdpaCached(Op):
    """Attention of q [B, T, H, C] at `positions` (i64[T]) over a key-value cache k, v [B, S, G, C].

    Cache rows after a query's position are ignored. `window` and `documents` are those of Sdpa; with `documents`, the
    document starts are the fifth input.
    """

    name: ClassVar[str] = "sdpa_cached"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    window: int | None = None
    documents: bool = False

    @property
    def arity(self) -> int:
        return 4 + self.documents

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v, _, *starts = inputs
        check_heads(q, k, v)
        _check_starts(q, starts, 4)
        return (q,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q, k = inputs[0], inputs[1]
        return 4 * q.count(sizes) * k.with_shape(k.shape[1]).count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        window = () if self.window is None else (str(self.window),)
        return f"{self.support(inputs)}({', '.join((*args, *window))})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        words = ("_documents" if self.documents else "", "_window" if self.window is not None else "")
        return f"attend_cached{''.join(words)}"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        window = () if self.window is None else (self.window,)
        return Traced(self.support(inputs), (*map(Input, range(len(inputs))), *window))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        q, k, v, positions, *starts = inputs
        row, column = positions.unsqueeze(1), torch.arange(k.shape[1], device=q.device)
        allowed = (column <= row) & (row - column < (self.window or k.shape[1]))
        return attended_to(q, k, v, _within(allowed, column, starts))


@dataclass(frozen=True, slots=True)
class SdpaSeen(Op):
    """Bidirectional attention of q [B, T, H, C] over the positions of k, v [B, S, G, C] with `seen` bool[B, S] True."""

    name: ClassVar[str] = "sdpa_seen"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"

    @property
    def arity(self) -> int:
        return 4

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v, seen = inputs
        check_heads(q, k, v)
        if seen.shape != k.shape[:2]:
            raise TypeRuleError(f"sees {seen} of keys {k}", (1, 3))
        return (q,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q, k = inputs[0], inputs[1]
        return 4 * q.count(sizes) * k.with_shape(k.shape[1]).count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{self.support(inputs)}({', '.join(args)})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "attend_seen"

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        q, k, v, seen = inputs
        return attended_to(q, k, v, seen[:, None, None])
