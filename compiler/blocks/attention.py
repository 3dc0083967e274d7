"""Attention to the sequence itself or to a source: grouped queries, rotary positions, normalized q and k, a window."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.init import constant
from specc.compiler.blocks.roles import Layer, Lowered, Shape, Surroundings
from specc.compiler.ir import Builder, Op, TensorType
from specc.compiler.ops.attention import CacheWrite, Sdpa, SdpaCached, SdpaSeen
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.rope import Rope, RopeAngles
from specc.compiler.ops.sequence import Zeros
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
    """softmax(q k^T / sqrt(C)) v for `heads` query heads over `kv_heads` key and value heads (Ainslie et al., 2023).

    Of `self`, each token sees those up to itself, or in an encoder all tokens of the source; of `encoder`, the source.
    With `bias` each of the four matrices adds a vector.
    """

    kind: Literal["attention"]
    heads: Positive
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    rope: RopeSpec | None = None
    qk_norm: QkNorm | None = None
    window: Positive | None = None
    of: Literal["self", "encoder"] = "self"
    bias: bool = False

    @property
    def reads_source(self) -> bool:
        return self.of == "encoder"

    @property
    def in_place(self) -> bool:
        return not self.reads_source

    @property
    def reads_seen(self) -> bool:
        return True

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
        for name in ("rope", "window"):
            if self.reads_source and getattr(self, name) is not None:
                message = f"attention of the encoder has no {name}: its keys are at positions of another sequence"
                yield Problem((name,), "S231", message, f"leave {name} out")

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
        kept = "S" if self.reads_source else shape.kept
        rows = shape.activation("B", kept, self.kv_heads or self.heads, self.size(shape.dim))
        return {"k": rows, "v": rows}

    def begin(self, b: Builder, shape: Shape, around: Surroundings) -> Mapping[str, str]:
        if self.reads_source:
            return self._keys(b, around.memory, shape, around)
        _, positions, heads, size = self.state(shape)["k"].shape
        assert isinstance(positions, int) and isinstance(heads, int) and isinstance(size, int)
        empty = Zeros((positions, heads, size))
        return {name: b.add(f"{name}.cache", empty, (around.memory,)) for name in ("k", "v")}

    def lower(self, b: Builder, x: str, shape: Shape, around: Surroundings) -> Lowered:
        q = self._heads(b, x, "q", self.heads, shape)
        if self.reads_source:
            kept = around.cache or self._keys(b, around.memory, shape, around)
            q = self._gained(b, self._positioned(b, q, "q", around, shape), shape)
            return Lowered(self._out(b, b.add("y", SdpaSeen(), (q, kept["k"], kept["v"], around.seen)), shape))
        keys = self._keys(b, x, shape, around, q)
        q, k, v = self._gained(b, keys["q"], shape), keys["k"], keys["v"]
        state: dict[str, str] = {}
        if around.cache:
            for name, value in (("k", k), ("v", v)):
                state[name] = b.add(f"{name}.cache", CacheWrite(), (around.cache[name], value, around.positions))
            attended = b.add("y", SdpaCached(self.window), (q, state["k"], state["v"], around.positions))
        elif around.causal:
            attended = b.add("y", Sdpa(self.window), (q, k, v))
        else:
            attended = b.add("y", SdpaSeen(), (q, k, v, around.seen))
        return Lowered(self._out(b, attended, shape), state)

    def _keys(self, b: Builder, x: str, shape: Shape, around: Surroundings, q: str = "") -> dict[str, str]:
        """k and v of x; q, where it is given, gets its positions along with k."""
        groups = self.kv_heads or self.heads
        k, v = self._heads(b, x, "k", groups, shape), self._heads(b, x, "v", groups, shape)
        found = {"q": self._positioned(b, q, "q", around, shape)} if q else {}
        return found | {"k": self._positioned(b, k, "k", around, shape), "v": v}

    def _gained(self, b: Builder, q: str, shape: Shape) -> str:
        if self.qk_norm is None or self.qk_norm.gain is None:
            return q
        gain = b.param("q_gain", shape.activation(self.heads, 1), constant(self.qk_norm.gain))
        return b.add("q.gain", Pointwise(("q * gain",), ("q", "gain")), (q, gain))

    def _out(self, b: Builder, attended: str, shape: Shape) -> str:
        merged = b.add("y.merged", MergeHeads(), (attended,))
        size = (shape.dim, self.heads * self.size(shape.dim))
        return affine(b, merged, "out", size, shape, shape.output_init, self.bias)

    def _heads(self, b: Builder, x: str, name: str, heads: int, shape: Shape) -> str:
        features = b.types[x].width if self.reads_source and name != "q" else shape.dim
        size = (heads * self.size(shape.dim), features)
        made = affine(b, x, name, size, shape, shape.matrix_init, self.bias)
        return b.add(f"{name}.heads", SplitHeads(heads), (made,))

    def _positioned(self, b: Builder, x: str, name: str, around: Surroundings, shape: Shape) -> str:
        if self.qk_norm is not None:
            x = b.add(f"{name}.norm", RmsNorm(self.qk_norm.eps), (x,))
        angles = self._angles(self.size(shape.dim))
        if angles is not None:
            cos = around.shared[angles[0]]
            x = b.add(f"{name}.rope", Rope(), (x, cos, around.shared[f"{angles[0]}:1"]))
        return x
