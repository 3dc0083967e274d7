"""Multi-head latent attention. The keys and values of all heads are computed from one small latent per token."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isclose
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import WEIGHTLESS, NormWeight, Trait, normalized
from specc.compiler.blocks.rope import RopeSpec, RopeTable
from specc.compiler.blocks.score_and_mask import ScoreAndMask
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import HeadLinear, Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.sequence import Concat
from specc.compiler.ops.shape import ExpandHeads, MergeHeads, SplitHeads
from specc.compiler.strict import Positive, PositiveFloat, Problem, StrictModel

Biases = Annotated[
    tuple[Literal["q_down", "q", "q_rope", "kv_down", "k_rope", "out"], ...], Field(min_length=1, max_length=6)
]


class LatentNorm(StrictModel):
    """The RMSNorm of a latent.

    Attributes:
        weight: a learned factor of each feature, as in the norms of blocks.
        eps: the epsilon added to the mean square.
    """

    weight: NormWeight = "w"
    eps: PositiveFloat = 1e-6


class Latent(ScoreAndMask):
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434).

    The latent c [B, T, kv_rank] of a token is a normalized matrix product of the token's input. Matrix products of c
    are the keys and values of all heads. Separate channels carry the positions: each head has a rotated part of q, and
    all heads share one rotated part of k, [B, T, rope_dim].

    A cache stores c and the rotated part of k. Programs with a cache never compute keys and values of cached tokens.
    These programs instead multiply q by the key matrix, and the attended latents by the value matrix.

    In the expressions `score`, `mask` and `scale`, `head_dim` is the sum of the fields `head_dim` and `rope_dim`,
    which is the number of channels of a whole query head.

    Attributes:
        kv_rank: the number of features of the latent for keys and values.
        q_rank: the number of features of a second latent, for queries. If unset, queries are computed from the input.
        head_dim: the number of unrotated channels of q and k per head. By default, `dim` divided by `heads`. In
            expressions, `head_dim` also counts the rotated channels.
        rope_dim: the number of rotated channels of q and k per head.
        v_dim: the number of channels of v per head. By default, `head_dim`.
        rope: the rotary positions.
        norm: the norm of the latents. null for no norm.
        bias: whether all matrices have a bias, or a list of the matrices with a bias. The matrices from the latent to
            keys and values have no bias.
    """

    inner: ClassVar[tuple[str, ...]] = ("y",)

    kind: Literal["latent"]
    kv_rank: Positive
    q_rank: Positive | None = None
    head_dim: Positive | None = None
    rope_dim: Positive
    v_dim: Positive | None = None
    rope: RopeSpec = RopeSpec.model_construct()
    norm: LatentNorm | None = LatentNorm.model_construct()
    bias: bool | Biases = False

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"in_place"})

    def size(self, dim: int) -> int:
        return self._keys(dim) + self.rope_dim

    def sizes(self, dim: int) -> Mapping[str, int]:
        values = self.heads * self._values(dim)
        return {"heads": self.heads, "kv_heads": self.heads, "head_dim": self.size(dim), "values": values}

    def _keys(self, dim: int) -> int:
        return self.head_dim or dim // self.heads

    def _values(self, dim: int) -> int:
        return self.v_dim or self._keys(dim)

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        if self.head_dim is None and shape.dim % self.heads:
            yield self.indivisible(shape.dim)
            return
        if not shape.causal:
            message = "latent attention attends only to earlier tokens, but this layer attends to a whole line"
            yield Problem(("kind",), "S275", message, "use `kind: attention`")
            return
        yield from (problem.under("rope") for problem in self.rope.problems_in(self.rope_dim))
        yield from super().problems_in(shape)

    def rope_table(self, shape: Shape) -> RopeTable:
        return self.rope.table(self.rope_dim, shape.context)

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        return self.caches(shape, kv=self.rows(shape, 1, self.kv_rank + self.rope_dim))

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        q, q_rope = self._queries(b, x, shape, context)
        c = self._normed(b, affine(b, x, "kv_down", (self._rank(shape), shape.dim), shape, self.bias), "kv")
        size = (self._rotated(shape), shape.dim)
        k_rope = affine(b, x, "k_rope", size, shape, self.bias)
        k_rope = b.add("k_rope.heads", SplitHeads(1), (k_rope,))
        k_rope = self.rope_table(shape).rotate(b, k_rope, "k_rope.turned", context)
        lowered = self._absorbed if context.cache else self._naive
        y, state = lowered(b, (q, q_rope), c, k_rope, shape, context)
        y = self.wired("y", lambda: y, self.queries(shape), context)
        size = (shape.dim, self.queries(shape) * self._value_channels(shape))
        merged = b.add("y.merged", MergeHeads(), (y,))
        return Lowered(affine(b, merged, "out", size, shape, self.bias, shape.output_init), state)

    def _queries(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> tuple[str, str]:
        """Adds the nodes of the queries. Returns two parts of the queries: unrotated [B, T, H, N] and rotated [B, T,
        H, R]."""
        heads, features = self.queries(shape), shape.dim
        if self.q_rank is not None:
            features = shape.size("Q_RANK", self.q_rank, "features of the latent of queries", self.title)
            down = affine(b, x, "q_down", (features, shape.dim), shape, self.bias)
            x = self._normed(b, down, "q")
        parts = []
        for name, channels in (("q", self._key_channels(shape)), ("q_rope", self._rotated(shape))):
            part = affine(b, x, name, (heads * channels, features), shape, self.bias)
            parts.append(b.add(f"{name}.heads", SplitHeads(heads), (part,)))
        return parts[0], self.rope_table(shape).rotate(b, parts[1], "q_rope.turned", context)

    def _naive(
        self, b: Builder, q: tuple[str, str], c: str, k_rope: str, shape: Shape, context: LoweringContext
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the nodes that compute the keys and values of all heads, and the node that attends to these keys and
        values. `q` has both parts of the queries, `c` are the latents, and `k_rope` is the rotated part of k. Returns
        the output of attention, [B, T, H, V], and an empty state."""
        heads = self.queries(shape)
        products = ((name, b.add(name, Linear(), (c, weight))) for name, weight in self._up(b, shape))
        k, v = (b.add(f"{name}.heads", SplitHeads(heads), (product,)) for name, product in products)
        k_rope = b.add("k_rope.all", ExpandHeads(heads), (k_rope,))
        q_whole, k_whole = b.add("q.whole", Concat(), q), b.add("k.whole", Concat(), (k, k_rope))
        q_whole = self.scaled(b, q_whole, shape)
        return self.attend(b, q_whole, {"k": k_whole, "v": v}, shape, context, self.score_fields(shape))

    def _absorbed(
        self, b: Builder, q: tuple[str, str], c: str, k_rope: str, shape: Shape, context: LoweringContext
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the nodes that attend to the cached latents. `q` has both parts of the queries, `c` are the latents of
        the input tokens, and `k_rope` is the rotated part of k. Returns the output of attention, [B, T, H, V], and the
        new state."""
        (_, key), (_, value) = self._up(b, shape)
        latent = b.add("latent", Concat(), (b.add("c.heads", SplitHeads(1), (c,)), k_rope))
        wide = b.add("q.whole", Concat(), (b.add("q.absorbed", HeadLinear(), (q[0], key)), q[1]))
        # attention divides by the square root of q's channels, and q has more channels here than in `_naive`
        fields = self.score_fields(shape)
        wide = self.scaled(b, wide, shape)
        factor = fields.scale or self.size(shape.dim) ** -0.5
        factor *= (self.kv_rank + self.rope_dim) ** 0.5
        if not isclose(factor, 1):
            wide = pointwise(b, "q.absorbed_scale", f"q * {factor!r}", q=wide)
        fields = replace(fields, scale=None)
        y, state = self.attend(b, wide, {"kv": latent}, shape, context, fields, int(self._rank(shape)))
        return b.add("y.values", HeadLinear(transposed=True), (y, value)), state

    def _up(self, b: Builder, shape: Shape) -> Iterator[tuple[str, str]]:
        for name, channels in (("k", self._key_channels(shape)), ("v", self._value_channels(shape))):
            size = shape.activation(self.queries(shape) * channels, self._rank(shape))
            yield name, b.param(name, size, shape.matrix_init)

    def _normed(self, b: Builder, latent: str, name: str) -> str:
        if self.norm is None:
            return latent
        op = RmsNorm(self.norm.eps, self.norm.weight != WEIGHTLESS)
        return normalized(b, latent, f"{name}_down.norm", op, self.norm.weight, False, f"{name}_norm")

    def _rank(self, shape: Shape) -> int:
        return shape.size("KV_RANK", self.kv_rank, "features of the latent of keys and values", self.title)

    def _rotated(self, shape: Shape) -> int:
        return shape.size("R", self.rope_dim, "channels of a head with rotary positions", self.title)

    def _key_channels(self, shape: Shape) -> int:
        return shape.size("C", self._keys(shape.dim), "channels of q and k of a head without positions", self.title)

    def _value_channels(self, shape: Shape) -> int:
        if self._values(shape.dim) == self._keys(shape.dim):
            return self._key_channels(shape)
        return shape.size("D", self._values(shape.dim), "channels of v of a head", self.title)
