"""Scaled dot-product attention, whole or against a cache of keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir import Input, Op, Sizes, TensorType, Traced, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


def _reference(q: "Tensor", k: "Tensor", v: "Tensor", allowed: "Tensor") -> "Tensor":
    """Softmax attention in the precision of q, head by head; `allowed` is bool[T, S]."""
    shared = q.shape[-2] // k.shape[-2]
    k, v = (tensor.repeat_interleave(shared, dim=-2) for tensor in (k, v))
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    attended: Tensor = weights @ v.transpose(1, 2)
    return attended.transpose(1, 2)


def _check(q: TensorType, k: TensorType, v: TensorType) -> None:
    heads, kv_heads = q.shape[-2], k.shape[-2]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads or k.shape != v.shape or q.width != k.width:
        raise TypeRuleError(f"attends with q {q}, k {k}, v {v}", (0, 1, 2))


@dataclass(frozen=True, slots=True)
class Sdpa(Op):
    """softmax(q k^T / sqrt(C)) v for q [B, T, H, C] and k, v [B, T, G, C], G dividing H; each token sees itself and
    those before it, and of them the last `window` where that is set."""

    name: ClassVar[str] = "sdpa"
    matrix: ClassVar[bool] = True
    window: int | None = None

    @property
    def arity(self) -> int:
        return 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v = inputs
        _check(q, k, v)
        return (q,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q = inputs[0]
        tokens = q.with_shape(q.shape[1]).count(sizes)
        most = min(self.window or tokens, tokens)
        pairs = most * tokens - most * (most - 1) // 2  # the first tokens see fewer
        return 4 * q.count(sizes) // tokens * pairs

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        window = () if self.window is None else (str(self.window),)
        return f"{self.support(inputs)}({', '.join((*args, *window))})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "attend" if self.window is None else "attend_window"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        window = () if self.window is None else (self.window,)
        return Traced(self.support(inputs), (*map(Input, range(len(inputs))), *window))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        q, k, v = inputs
        row, column = torch.arange(q.shape[1]).unsqueeze(1), torch.arange(k.shape[1])
        allowed = (column <= row) & (row - column < (self.window or q.shape[1]))
        return _reference(q, k, v, allowed.to(q.device))


@dataclass(frozen=True, slots=True)
class CacheWrite(Op):
    """The cache [B, S, G, C] with rows `positions` (i64[T]) replaced, in place, by x [B, T, G, C]."""

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
    """Attention of q [B, T, H, C] at `positions` (i64[T]) over caches k, v [B, S, G, C], whose later rows it
    ignores."""

    name: ClassVar[str] = "sdpa_cached"
    matrix: ClassVar[bool] = True
    window: int | None = None

    @property
    def arity(self) -> int:
        return 4

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v, _ = inputs
        _check(q, k, v)
        return (q,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q, k = inputs[0], inputs[1]
        return 4 * q.count(sizes) * k.with_shape(k.shape[1]).count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        window = () if self.window is None else (str(self.window),)
        return f"{self.support(inputs)}({', '.join((*args, *window))})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "attend_cached" if self.window is None else "attend_cached_window"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        window = () if self.window is None else (self.window,)
        return Traced(self.support(inputs), (*map(Input, range(len(inputs))), *window))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        q, k, v, positions = inputs
        row, column = positions.unsqueeze(1), torch.arange(k.shape[1], device=q.device)
        allowed = (column <= row) & (row - column < (self.window or k.shape[1]))
        return _reference(q, k, v, allowed)
