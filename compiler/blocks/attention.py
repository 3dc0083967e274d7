"""Causal attention: grouped queries, rotary positions, normalized q and k, a window."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.init import constant
from specc.compiler.blocks.roles import Layer, Lowered, Shape, Surroundings
from specc.compiler.ir import Builder, Op, TensorType
from specc.compiler.ops.attention import CacheWrite, Sdpa, SdpaCached
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.rope import Rope, RopeAngles
from specc.compiler.ops.shape import MergeHeads, SplitHeads
from specc.compiler.strict import Positive, PositiveFloat, Problem, StrictModel


class RopeSpec(StrictModel):
    """Rotary positions over the first `dims` of each head, all of them where unset."""

    dims: Annotated[int, Field(gt=0, le=4096)] | None = None
    base: PositiveFloat = 10000.0


class QkNorm(StrictModel):
    """RMSNorm of each head of q and k; with `gain`, q is then scaled by a learned number a head, starting there."""

    gain: PositiveFloat | None = None
    eps: PositiveFloat = 1e-6


class Attention(Layer):
    """softmax(q k^T / sqrt(C)) v for `heads` query heads over `kv_heads` key and value heads (Ainslie et al., 2023)."""

    kind: Literal["attention"]
    heads: Positive
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    rope: RopeSpec | None = None
    qk_norm: QkNorm | None = None
    window: Positive | None = None

    def size(self, dim: int) -> int:
        """Channels of a head."""
        return self.head_dim or dim // self.heads

    def problems_in(self, dim: int) -> Iterator[Problem]:
        if self.head_dim is None and dim % self.heads:
            hint = f"choose a divisor of {dim}, or set head_dim"
            yield Problem(("heads",), "S210", f"heads {self.heads} does not divide dim {dim}", hint)
            return
        if self.kv_heads is not None and self.heads % self.kv_heads:
            message = f"kv_heads {self.kv_heads} does not divide heads {self.heads}"
            hint = "each key and value head serves the same number of query heads"
            yield Problem(("kv_heads",), "S211", message, hint, related=(("the query heads", ("heads",)),))
        dims = self.rope.dims if self.rope is not None else None
        if dims is not None and dims > self.size(dim):
            message = f"RoPE rotates {dims} dims but a head has {self.size(dim)}"
            yield Problem(("rope", "dims"), "S212", message, f"use at most {self.size(dim)}, or leave dims out for all")
        if self.rope is not None and (dims or self.size(dim)) % 2:
            message = f"RoPE rotates pairs but has {dims or self.size(dim)} dims"
            yield Problem(("rope", "dims") if dims else ("rope",), "S213", message, "use an even number")

    def _angles(self, size: int) -> tuple[str, RopeAngles] | None:
        if self.rope is None:
            return None
        dims, base = self.rope.dims or size, self.rope.base
        # the name tells all there is of the angles: two layers that rotate alike share them, and no others
        return f"rope{dims}_{base:.17g}".replace(".", "p").replace("+", ""), RopeAngles(dims, base)

    def shared(self, dim: int) -> Mapping[str, Op]:
        angles = self._angles(self.size(dim))
        return dict([angles]) if angles else {}

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        kept = shape.activation("B", "S", self.kv_heads or self.heads, self.size(shape.dim))
        return {"k": kept, "v": kept}

    def lower(self, b: Builder, x: str, shape: Shape, around: Surroundings) -> Lowered:
        size, groups = self.size(shape.dim), self.kv_heads or self.heads
        q = self._heads(b, x, "q", self.heads, size, shape)
        k = self._heads(b, x, "k", groups, size, shape)
        v = self._heads(b, x, "v", groups, size, shape)
        q, k = self._positioned(b, q, "q", around, size), self._positioned(b, k, "k", around, size)
        if self.qk_norm is not None and self.qk_norm.gain is not None:
            gain = b.param("q_gain", shape.activation(self.heads, 1), constant(self.qk_norm.gain))
            q = b.add("q.gain", Pointwise(("q * gain",), ("q", "gain")), (q, gain))
        state: dict[str, str] = {}
        if around.cache:
            for name, value in (("k", k), ("v", v)):
                state[name] = b.add(f"{name}.cache", CacheWrite(), (around.cache[name], value, around.positions))
            attended = b.add("y", SdpaCached(self.window), (q, state["k"], state["v"], around.positions))
        else:
            attended = b.add("y", Sdpa(self.window), (q, k, v))
        merged = b.add("y.merged", MergeHeads(), (attended,))
        weight = b.param("out", shape.activation(shape.dim, self.heads * size), shape.output_init)
        return Lowered(b.add("out", Linear(), (merged, weight)), state)

    def _heads(self, b: Builder, x: str, name: str, heads: int, size: int, shape: Shape) -> str:
        weight = b.param(name, shape.activation(heads * size, shape.dim), shape.matrix_init)
        return b.add(f"{name}.heads", SplitHeads(heads), (b.add(name, Linear(), (x, weight)),))

    def _positioned(self, b: Builder, x: str, name: str, around: Surroundings, size: int) -> str:
        if self.qk_norm is not None:
            x = b.add(f"{name}.norm", RmsNorm(self.qk_norm.eps), (x,))
        angles = self._angles(size)
        if angles is not None:
            cos = around.shared[angles[0]]
            x = b.add(f"{name}.rope", Rope(), (x, cos, around.shared[f"{angles[0]}:1"]))
        return x
