"""Self-attention and cross-attention with grouped queries, rotary positions, normalized q and k, and any score and
mask."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.norm import norm_op
from specc.compiler.blocks.parts import WEIGHTLESS, NormWeight, Trait, normalized
from specc.compiler.blocks.pool import Pool
from specc.compiler.blocks.rope import RopeSpec, RopeTable
from specc.compiler.blocks.score_and_mask import ScoreAndMask
from specc.compiler.blocks.wiring import WiringText, failure
from specc.compiler.expr.wiring import parse_wiring
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.attention import SdpaSeen
from specc.compiler.ops.caches.key_value_cache import RingKeys
from specc.compiler.ops.exclusive import Exclusive
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.shape import MergeHeads, SplitHeads
from specc.compiler.programs.init import constant
from specc.compiler.strict import Positive, PositiveFloat, Problem, StrictModel, later


class QkNorm(StrictModel):
    """The norms of q and k, which have separate parameters.

    Attributes:
        kind: RMSNorm or LayerNorm.
        weight: a learned factor of each feature, as in the norms of blocks.
        bias: whether to add a learned number per feature, initially 0.
        over: the features that are normalized together. `head`: the features of one head, with the same weights for all
            heads. `all`: the features of all heads.
        after_rope: whether the norm follows the rotation of the heads. Otherwise, the norm precedes the rotation.
        gain: the initial value of a learned factor of q, one per head. If unset, there is no factor.
        eps: the epsilon added to the mean square or variance.
    """

    kind: Literal["rms", "layer"] = later("rms")
    weight: NormWeight = later(WEIGHTLESS)
    bias: bool = later(False)
    over: Literal["head", "all"] = later("head")
    after_rope: bool = later(False)
    gain: PositiveFloat | None = None
    eps: PositiveFloat = 1e-6

    def lower(self, b: Builder, x: str, name: str) -> str:
        op = norm_op(self.kind, self.eps, self.weight, self.bias)
        return normalized(b, x, f"{name}.norm", op, self.weight, self.bias, f"{name}_norm")


class Exclude(StrictModel):
    """Exclusive self-attention (XSA, arXiv 2603.09078). Subtracts the component along the token's own value from the
    output of each head."""


Biases = Annotated[tuple[Literal["q", "k", "v", "out"], ...], Field(min_length=1, max_length=4)]


class Attention(ScoreAndMask):
    """softmax(q k^T / sqrt(C)) v in several heads (Ainslie et al., 2023).

    Attributes:
        kv_heads: the number of key heads and of value heads. By default, `heads`.
        head_dim: the number of features C per head. By default, the features of the model divided by `heads`.
        rope: rotary positions.
        qk_norm: the normalization of q and k.
        of: what each token attends to. `self`: the token itself and earlier tokens; in an encoder, all tokens of the
            source. `encoder`: the source.
        bias: whether the four matrices have a bias, or a list of the matrices with a bias.
        q: the queries: an expression of the projected `q` of each head, after the norm and before the rotation.
        k: the keys: an expression of the projected `k` of each head, after the norm and before the rotation.
        v: the values: an expression of the projected `v` of each head. If the expression does not read `v`, there is no
            projection. `value(k)` is the result of this expression in run k, in the layer of the same name. Runs are
            executions of blocks, counted from 0. `value(k)` permits value residuals (Zhou et al. 2024, arXiv
            2410.17897).
        exclude: exclusive self-attention.
        pool: pooled keys and values, each for a whole block of earlier tokens. A query attends to these blocks, and to
            the tokens that the mask admits.
    """

    inner: ClassVar[tuple[str, ...]] = ("q", "k", "v", "y")
    over_values: ClassVar[tuple[str, ...]] = ("v",)
    of_tokens: ClassVar[tuple[str, ...]] = (*ScoreAndMask.of_tokens, "pool")

    kind: Literal["attention"]
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    rope: RopeSpec | None = None
    qk_norm: QkNorm | None = None
    of: Literal["self", "encoder"] = "self"
    bias: bool | Biases = False
    q: WiringText | None = later(None)
    k: WiringText | None = later(None)
    v: WiringText | None = later(None)
    exclude: Exclude | None = later(None)
    pool: Pool | None = later(None)

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"reads_seen", "reads_source" if self.of == "encoder" else "in_place"})

    def size(self, dim: int) -> int:
        return self.head_dim or dim // self.heads

    def sizes(self, dim: int) -> Mapping[str, int]:
        groups, size = self.kv_heads or self.heads, self.size(dim)
        return {"heads": self.heads, "kv_heads": groups, "head_dim": size, "values": groups * size}

    def head_values(self, dim: int) -> tuple[int, int] | None:
        return None if self.reads_source else (self.kv_heads or self.heads, self.size(dim))

    def _channels(self, shape: Shape) -> int:
        return shape.size("C", int(self.size(shape.dim)), "channels per head", self.title)

    def _groups(self, shape: Shape) -> int:
        if self.kv_heads in (None, self.heads):
            return self.queries(shape)
        assert self.kv_heads is not None
        return shape.size("G", self.kv_heads, "heads of keys and values", self.title)

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        if self.head_dim is None and shape.dim % self.heads:
            yield self.indivisible(shape.dim)
            return
        if self.kv_heads is not None and self.heads % self.kv_heads:
            message = f"`kv_heads` is {self.kv_heads}, which does not divide `heads`, {self.heads}"
            hint = f"choose a divisor of {self.heads}"
            yield Problem(("kv_heads",), "S211", message, hint, related=(("the query heads", ("heads",)),))
        if self.rope is not None:
            yield from (problem.under("rope") for problem in self.rope.problems_in(self.size(shape.dim)))
        for name in ("rope", "k", "v", "exclude", "bos"):
            if self.reads_source and getattr(self, name) is not None:
                message = f"attention with `of: encoder` cannot have `{name}`, because its keys belong to another line"
                yield Problem((name,), "S231", message, f"remove `{name}`")
        for name in ("q", "k"):
            text: str | None = getattr(self, name)
            if text is not None and name not in parse_wiring(text).names.values():
                message = f"the expression under `{name}` must read `{name}`, the value that it replaces"
                yield Problem((name,), "S246", message, f"for example `{name} * factor`")
        if self.qk_norm is not None and self.qk_norm.after_rope and self.qk_norm.over == "all":
            message = (
                "`over: all` normalizes all heads together, which is not possible after RoPE has rotated each head"
            )
            hint = "remove `after_rope`, or use `over: head`"
            yield Problem(("qk_norm", "after_rope"), "S285", message, hint)
        yield from super().problems_in(shape)

    def visible_problems(self, shape: Shape) -> Iterator[Problem]:
        if self.pool is None:
            return
        problems = tuple(problem.under("pool") for problem in self.pool.problems_in(shape.context, self.masks))
        yield from problems
        path = ("pool",) if self.pool.mask is None else ("pool", "mask")
        for mask in () if problems else self.masks:
            visible = partial(self.visible, self.bound_mask(mask, shape), shape)
            yield from failure(visible, path, "S276", "write a simpler mask")

    @property
    def only_masked(self) -> bool:
        return self.pool is None

    def visible(self, mask: str, shape: Shape) -> str:
        return mask if self.pool is None else f"({mask}) or ({self.pool.bound(mask, self.heads, shape)})"

    def ring(self, shape: Shape) -> tuple[int, int] | None:
        ring = super().ring(shape)
        return ring if ring is None or self.pool is None else (ring[0], max(ring[1], self.pool.block))

    def rope_table(self, shape: Shape) -> RopeTable | None:
        return None if self.rope is None else self.rope.table(self.size(shape.dim), shape.context)

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        rows = self.rows(shape, self._groups(shape), self._channels(shape))
        pooled = {} if self.pool is None else self.pool.state(rows, shape.context)
        return {**self.caches(shape, k=rows, v=rows), **pooled}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        if self.reads_source:
            return self._keys(b, context.memory, shape, context)
        return super().begin(b, shape, context)

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        q = self._heads(b, x, "q", self.queries(shape), shape)
        state: Mapping[str, str] = {}
        if self.reads_source:
            rows = context.cache or self._keys(b, context.memory, shape, context)
            q = self._gained(b, self._positioned(b, q, "q", context, shape), shape)
        else:
            rows = self._keys(b, x, shape, context, q)
            q, rows = self._gained(b, rows["q"], shape), {"k": rows["k"], "v": rows["v"]}
        if self.reads_source or not shape.causal:
            y = b.add("y", SdpaSeen(), (q, rows["k"], rows["v"], context.seen))
        else:
            q = self.scaled(b, q, shape)
            if self.pool is None:
                y, state = self.attend(b, q, rows, shape, context, self.score_fields(shape))
            else:
                y, state = self._pooled(b, self.pool, q, rows, shape, context)
        if self.exclude is not None:
            y = b.add("y.exclusive", Exclusive(), (y, rows["v"]))
        y = b.add("y.merged", MergeHeads(), (self.wired("y", lambda: y, self.queries(shape), context),))
        size = (shape.dim, self.queries(shape) * self._channels(shape))
        y = affine(b, y, "out", size, shape, self.bias, shape.output_init)
        return Lowered(y, state, head_values="" if self.reads_source else rows["v"])

    def _pooled(
        self, b: Builder, pool: Pool, q: str, rows: Mapping[str, str], shape: Shape, context: LoweringContext
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the node that attends to pooled blocks and to single tokens. Returns the output of the node and the new
        state.

        Args:
            b: The builder of the function.
            pool: The pooling.
            q: The queries, [B, T, H, C].
            rows: The keys `k` and values `v` of the input tokens, [B, T, G, C].
            shape: The sizes of the model.
            context: The other values that the layer can read.
        """
        fields = self.score_fields(shape)
        mask = pool.bound(fields.mask, self.heads, shape)
        latents = pool.latents(b, self._groups(shape), self._channels(shape), shape)
        others = tuple(self.further(b, fields, shape, context))
        if not context.cache:
            return b.add("y", pool.op(fields, mask), (q, *rows.values(), *others, *latents)), {}
        ring = self.ring(shape)
        pairs = {name: (context.cache[name], row) for name, row in rows.items()}
        # a ring buffer is read before the new rows replace old rows
        read = {name: b.add(f"{name}.rows", RingKeys(), pair) for name, pair in pairs.items() if ring is not None}
        written = self.written(b, rows, shape, context)
        pooled = pool.write(b, read or written, latents, context, ring)
        inputs = (q, *(read or written).values(), context.positions, *pooled.values(), *others)
        return b.add("y", pool.cached_op(fields, mask, ring), inputs), {**written, **pooled}

    def _keys(self, b: Builder, x: str, shape: Shape, context: LoweringContext, q: str = "") -> dict[str, str]:
        """Adds the nodes of k and v, projected from `x`. If `q` is given, also adds the norm and the rotation of `q`.
        Returns the values by name."""
        groups = self._groups(shape)
        k = self._heads(b, x, "k", groups, shape)
        v = self.wired("v", lambda: self._heads(b, x, "v", groups, shape), groups, context)
        queries = {"q": self._positioned(b, q, "q", context, shape)} if q else {}
        return queries | {"k": self._positioned(b, k, "k", context, shape), "v": v}

    def _gained(self, b: Builder, q: str, shape: Shape) -> str:
        if self.qk_norm is None or self.qk_norm.gain is None:
            return q
        gain = b.param("q_gain", shape.activation(self.queries(shape), 1), constant(self.qk_norm.gain))
        return pointwise(b, "q.gain", "q * gain", q=q, gain=gain)

    def _heads(self, b: Builder, x: str, name: str, heads: int, shape: Shape) -> str:
        features = b.types[x].width if self.reads_source and name != "q" else shape.dim
        size = (heads * self._channels(shape), features)
        projection = affine(b, x, name, size, shape, self.bias)
        if self.qk_norm is not None and self.qk_norm.over == "all" and name != "v":
            projection = self.qk_norm.lower(b, projection, name)
        return b.add(f"{name}.heads", SplitHeads(heads), (projection,))

    def _positioned(self, b: Builder, x: str, name: str, context: LoweringContext, shape: Shape) -> str:
        norm = self.qk_norm if self.qk_norm is not None and self.qk_norm.over == "head" else None
        if norm is not None and not norm.after_rope:
            x = norm.lower(b, x, name)
        x = self.wired(name, lambda: x, self.queries(shape) if name == "q" else self._groups(shape), context)
        if (table := self.rope_table(shape)) is not None:
            x = table.rotate(b, x, f"{name}.rope", context)
        return norm.lower(b, x, name) if norm is not None and norm.after_rope else x
