"""Self-attention and cross-attention: grouped queries, rotary positions, normalized q and k, any score and mask."""

from collections.abc import Callable, Iterator, Mapping
from math import isclose
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape, Shared
from specc.compiler.blocks.document_mask import Documents
from specc.compiler.blocks.init import constant, formula, value_of
from specc.compiler.blocks.parts import WEIGHTLESS, Layer, NormWeight, normalized
from specc.compiler.blocks.previous import TokenId
from specc.compiler.blocks.rope import RopeSpec, RopeTable
from specc.compiler.blocks.wiring import WiringText, number, parse_wiring
from specc.compiler.expr import Const, ExprError, parse, substitute, variables
from specc.compiler.expr.interval import atoms
from specc.compiler.expr.mask import CAUSAL, bound_mask, parse_mask, window_of
from specc.compiler.expr.score import PLAIN, bound_score, parse_score
from specc.compiler.expr.values import Read
from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.attention import ScoreFields, Sdpa, SdpaCached, SdpaSeen
from specc.compiler.ops.exclusive import Exclusive
from specc.compiler.ops.key_value_cache import CacheWrite, RingKeys
from specc.compiler.ops.norm import LayerNorm, RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.positions import Rope
from specc.compiler.ops.sequence import Zeros
from specc.compiler.ops.shape import MergeHeads, SplitHeads
from specc.compiler.schedule import SegmentSchedule, points_of
from specc.compiler.strict import Positive, PositiveFloat, Problem, StrictModel, Unit, later


class QkNorm(StrictModel):
    """The norms of q and k, each with its parameters.

    Attributes:
        kind: RMSNorm, or LayerNorm without a bias.
        weight: a learned factor of each feature, as in the norms of blocks.
        over: the features of a norm: those of each `head`, with weights that all heads share, or those of `all` heads.
        after_rope: whether the norm follows the rotary positions. If false, it is before them.
        gain: the initial value of one learned factor per head, which scales q; no factor if unset.
        eps: the epsilon added to the mean square or variance.
    """

    kind: Literal["rms", "layer"] = later("rms")
    weight: NormWeight = later(WEIGHTLESS)
    over: Literal["head", "all"] = later("head")
    after_rope: bool = later(False)
    gain: PositiveFloat | None = None
    eps: PositiveFloat = 1e-6

    def lower(self, b: Builder, x: str, name: str) -> str:
        """Adds the norm of `x`, which is q or k by its `name`, and returns the result."""
        weighted = self.weight != WEIGHTLESS
        op = RmsNorm(self.eps, weighted) if self.kind == "rms" else LayerNorm(self.eps, weighted, bias=False)
        return normalized(b, x, f"{name}.norm", op, self.weight, f"{name}_norm")


class Exclude(StrictModel):
    """Exclusive self-attention (XSA, arXiv 2603.09078): removes from each head's output its component along the token's
    own value."""


Biases = Annotated[tuple[Literal["q", "k", "v", "out"], ...], Field(min_length=1, max_length=4)]


def _mask(text: str) -> str:
    parse_mask(text)  # ExprError is a ValueError
    return text


MaskText = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_mask)]


class MaskSchedule(SegmentSchedule):
    """A mask that changes during training."""

    at: Annotated[tuple[tuple[Unit, MaskText], ...], Field(min_length=1, max_length=16)]


ScoreText = Annotated[str, Field(min_length=1, max_length=500)]


class Attention(Layer):
    """softmax(q k^T / sqrt(C)) v in several heads (Ainslie et al., 2023).

    Attributes:
        heads: the query heads.
        kv_heads: the key and value heads; as many as `heads` if unset.
        head_dim: the features C of a head; the model's divided by `heads` if unset.
        rope: rotary positions.
        qk_norm: the normalization of q and k.
        score: the score of a query and a key, an expression of `s`, their scaled product. It may read the positions `i`
            of the query and `j` of the key, the head `h`, `heads`, `context`, `slope(h)` (the slopes of ALiBi, Press et
            al., 2022), elements of learned tables such as `bias[h, bucket(i - j, 32, 128)]`, and `bucket` (the buckets
            of distances of T5, Raffel et al., 2020).
        mask: the condition under which a query attends to a key, over `i`, `j` and `h`, such as `j <= i and i - j <
            512`. `document(i) == document(j)` holds within a document. It may change by a schedule.
        scale: the factor of the product of q and k, a number or a formula of `head_dim`, `layer` and `layers`;
            `1/sqrt(head_dim)` if unset.
        sinks: whether each head has a learned logit that adds to the denominator of the softmax alone.
        of: `self`: each token attends to itself and earlier tokens, or in an encoder to all tokens of the source.
            `encoder`: it attends to the source.
        bias: whether the four matrices have a bias, or those that have one.
        v: the values, an expression of the projected `v` of each head. If it does not read `v`, there is no projection.
        y: the output, an expression of the attended `y` of each head.
        exclude: exclusive self-attention.
        bos: the id that starts a document, for `document` in the mask.
    """

    inner: ClassVar[tuple[str, ...]] = ("v", "y")

    kind: Literal["attention"]
    heads: Positive
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    rope: RopeSpec | None = None
    qk_norm: QkNorm | None = None
    score: ScoreText = later(PLAIN)
    mask: MaskText | MaskSchedule = later(CAUSAL)
    scale: Annotated[float | str, formula("head_dim", "layer", "layers")] | None = later(None)
    sinks: bool = later(False)
    of: Literal["self", "encoder"] = "self"
    bias: bool | Biases = False
    v: WiringText | None = later(None)
    y: WiringText | None = later(None)
    exclude: Exclude | None = later(None)
    bos: TokenId | None = later(None)

    @property
    def masks(self) -> tuple[str, ...]:
        """The masks of a run, in order."""
        return tuple(mask for _, mask in points_of(self.mask))

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
        """Returns the number of channels of a head."""
        return self.head_dim or dim // self.heads

    def values_width(self, dim: int) -> int | None:
        return (self.kv_heads or self.heads) * self.size(dim)

    def _channels(self, shape: Shape) -> int:
        return shape.size("C", int(self.size(shape.dim)), "channels of a head", self.title)

    def _queries(self, shape: Shape) -> int:
        """Returns the number of query heads."""
        return shape.size("H", self.heads, "heads", self.title)

    def _groups(self, shape: Shape) -> int:
        """Returns the number of key and value heads."""
        if self.kv_heads in (None, self.heads):
            return self._queries(shape)
        assert self.kv_heads is not None
        return shape.size("G", self.kv_heads, "heads of keys and values", self.title)

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        if self.head_dim is None and dim % self.heads:
            hint = f"choose a divisor of {dim}, or set head_dim"
            yield Problem(("heads",), "S210", f"{self.heads} heads do not divide dim {dim}", hint)
            return
        if self.kv_heads is not None and self.heads % self.kv_heads:
            message = f"{self.kv_heads} kv_heads do not divide {self.heads} heads"
            hint = f"choose a divisor of {self.heads}"
            yield Problem(("kv_heads",), "S211", message, hint, related=(("the query heads", ("heads",)),))
        if self.rope is not None:
            yield from (problem.under("rope") for problem in self.rope.problems_in(self.size(dim)))
        yield from self._expression_problems()
        for name in ("rope", "v", "exclude", "bos"):
            if self.reads_source and getattr(self, name) is not None:
                message = f"attention to the encoder cannot have {name}: its keys have positions of another sequence"
                yield Problem((name,), "S231", message, f"remove {name}")
        if self.qk_norm is not None and self.qk_norm.after_rope and self.qk_norm.over == "all":
            message = "the norm of q and k is over all heads, but rotary positions are of single heads"
            hint = "remove after_rope, or use `over: head`"
            yield Problem(("qk_norm", "after_rope"), "S285", message, hint)

    def _expression_problems(self) -> Iterator[Problem]:
        """Yields the problems of the score and the mask that do not depend on the context."""
        documents = any("document" in mask for mask in self.masks)
        if documents and self.bos is None:
            message = "the mask reads documents, but no id starts a document"
            yield Problem(("mask",), "S272", message, "set `bos` to the id that the tokenizer puts before a document")
        if self.bos is not None and not documents and not self.reads_source:
            message = f"bos is {self.bos}, but the mask reads no documents"
            hint = f"add it to the mask: `{self.masks[-1]} and document(i) == document(j)`, or remove bos"
            yield Problem(("bos",), "S272", message, hint)
        dims = {name: len(shape) for name, shape in self.tables(1).items()}
        try:
            expr = parse_score(self.score, dims)
        except ExprError as error:
            yield Problem(("score",), "S271", error.message, error.hint or "write an expression of s")
            return
        for name in dims:
            if name not in {part.table for part in atoms(expr) if isinstance(part, Read)}:
                message = f"the score does not read the table {name}"
                yield Problem(("learn", name), "S247", message, f"read an element of {name} in `score`, or remove it")

    def problems_of_context(self, context: int, causal: bool) -> Iterator[Problem]:
        if not causal or self.reads_source:
            for name, default in (("score", PLAIN), ("mask", CAUSAL), ("scale", None), ("sinks", False)):
                if getattr(self, name) != default:
                    message = f"{name} is for attention to earlier tokens; this attends to a whole source"
                    yield Problem((name,), "S275", message, f"remove {name}")
            return
        try:
            masks = [bound_mask(mask, self.heads, context) for mask in self.masks]
        except ExprError as error:
            yield Problem(("mask",), "S276", error.message, error.hint or "write a simpler mask")
            return
        try:
            for mask in masks:
                bound_score(self.score, tuple(self.tables(context).items()), mask, self.heads, context)
        except ExprError as error:
            yield Problem(("score",), "S271", error.message, error.hint or "write a simpler score")

    def tables(self, context: int) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the learned tables of the score, by name, in a model of `context` tokens."""
        sizes = {"heads": self.heads, "context": context}
        learned = {name: value.dims(sizes) for name, value in self.learn.items()}
        return {name: shape for name, shape in learned.items() if shape is not None}

    @property
    def own_values(self) -> tuple[str, ...]:
        return tuple(self.tables(1))

    def _expressions(self, shape: Shape) -> ScoreFields:
        """Returns the settings of attention in a model of this shape."""
        heads, tables = self.heads, self.tables(shape.context)
        mask = bound_mask(self.masks[-1], heads, shape.context)
        score = bound_score(self.score, tuple(tables.items()), mask, heads, shape.context)
        scale = None if self.scale is None or self._layered else self._scale(shape)
        usual = scale is not None and isclose(scale, self.size(shape.dim) ** -0.5, rel_tol=1e-12)
        return ScoreFields(score, mask, None if usual else scale, tuple(tables), self.sinks)

    @property
    def _layered(self) -> bool:
        """Whether the scale depends on the layer. q is then scaled, so that layers share their code."""
        return isinstance(self.scale, str) and "layer" in variables(parse(self.scale))

    def _scale(self, shape: Shape) -> float:
        assert self.scale is not None
        values = {"head_dim": self.size(shape.dim), "layer": shape.layer, "layers": shape.layers}
        return value_of(self.scale, **{name: float(value) for name, value in values.items()})

    def _ring(self, shape: Shape) -> tuple[int, int] | None:
        """Returns the numbers of first and of last positions that the cache keeps; None if it keeps all."""
        if self.reads_source or not isinstance(shape.kept, str):
            return None
        fields = self._expressions(shape)
        return window_of(fields.mask, self.heads, shape.context)

    def _rope(self, shape: Shape) -> RopeTable | None:
        return None if self.rope is None else self.rope.table(self.size(shape.dim), shape.context)

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        tables = (self._rope(shape), self._documents)
        return tuple(table for table in tables if table is not None)

    @property
    def _documents(self) -> Documents | None:
        return None if self.bos is None else Documents(f"documents{self.bos}", ("starts",), mark=self.bos)

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        ring = self._ring(shape)
        positions = "S" if self.reads_source else shape.kept if ring is None else sum(ring)
        rows = shape.activation("B", positions, self._groups(shape), self._channels(shape))
        return {"k": rows, "v": rows}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        if self.reads_source:
            return self._keys(b, context.memory, shape, context)
        _, positions, heads, size = self.state(shape)["k"].shape
        assert isinstance(positions, int) and isinstance(heads, int) and isinstance(size, int)
        empty = Zeros((positions, heads, size))
        return {name: b.add(f"{name}.cache", empty, (context.memory,)) for name in ("k", "v")}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        q = self._heads(b, x, "q", self._queries(shape), shape)
        if self.reads_source:
            kept = context.cache or self._keys(b, context.memory, shape, context)
            q = self._gained(b, self._positioned(b, q, "q", context, shape), shape)
            attended = b.add("y", SdpaSeen(), (q, kept["k"], kept["v"], context.seen))
            return Lowered(self._out(b, attended, shape, context))
        keys = self._keys(b, x, shape, context, q)
        q, k, v = self._scaled(b, self._gained(b, keys["q"], shape), shape), keys["k"], keys["v"]
        if not context.causal:
            attended = b.add("y", SdpaSeen(), (q, k, v, context.seen))
            return Lowered(self._out(b, self._excluded(b, attended, v), shape, context))
        form = self._expressions(shape)
        further = tuple(self._further(b, form, shape, context))
        state: dict[str, str] = {}
        if context.cache:
            ring = self._ring(shape)
            read = {"k": k, "v": v}
            for name, value in read.items() if ring is not None else ():
                read[name] = b.add(f"{name}.kept", RingKeys(), (context.cache[name], value))
            for name, value in (("k", k), ("v", v)):
                written = (context.cache[name], value, context.positions)
                state[name] = b.add(f"{name}.cache", CacheWrite(ring), written)
            read = state if ring is None else read
            op = SdpaCached(form.score, form.mask, form.scale, form.tables, form.sinks, ring)
            attended = b.add("y", op, (q, read["k"], read["v"], context.positions, *further))
        else:
            whole = Sdpa(form.score, form.mask, form.scale, form.tables, form.sinks)
            attended = b.add("y", whole, (q, k, v, *further))
        return Lowered(self._out(b, self._excluded(b, attended, v), shape, context), state)

    def _further(self, b: Builder, form: ScoreFields, shape: Shape, context: LoweringContext) -> Iterator[str]:
        """Yields the further inputs of attention: the starts of documents, the sinks, and the tables."""
        if form.documents:
            assert self._documents is not None
            yield context.shared[self._documents.name]
        if self.sinks:
            yield b.param("sinks", shape.activation(self._queries(shape)), constant(0.0))
        sizes = {"heads": self._queries(shape), "context": shape.context}
        for name in form.tables:
            yield self.learn[name].declare(b, name, shape, sizes=sizes)

    def _keys(self, b: Builder, x: str, shape: Shape, context: LoweringContext, q: str = "") -> dict[str, str]:
        """Adds k and v of `x`, and the norm and rotary positions of `q` if it is given. Returns them by name."""
        groups = self._groups(shape)
        k = self._heads(b, x, "k", groups, shape)
        v = self._wired("v", lambda: self._heads(b, x, "v", groups, shape), groups, context)
        queries = {"q": self._positioned(b, q, "q", context, shape)} if q else {}
        return queries | {"k": self._positioned(b, k, "k", context, shape), "v": v}

    def _scaled(self, b: Builder, q: str, shape: Shape) -> str:
        """Returns q with the factor that replaces 1 / sqrt(C), if the scale depends on the layer."""
        if not self._layered:
            return q
        formula = substitute(parse(str(self.scale)), {"head_dim": Const(self.size(shape.dim))})
        text, numbers = number(b, f"({formula}) * sqrt({self.size(shape.dim)})", "attention_scale", shape)
        return b.add("q.scaled", Pointwise((f"q * {text}",), ("q", *numbers)), (q, *numbers.values()))

    def _gained(self, b: Builder, q: str, shape: Shape) -> str:
        if self.qk_norm is None or self.qk_norm.gain is None:
            return q
        gain = b.param("q_gain", shape.activation(self._queries(shape), 1), constant(self.qk_norm.gain))
        return b.add("q.gain", Pointwise(("q * gain",), ("q", "gain")), (q, gain))

    def _out(self, b: Builder, attended: str, shape: Shape, context: LoweringContext) -> str:
        attended = self._wired("y", lambda: attended, self._queries(shape), context)
        merged = b.add("y.merged", MergeHeads(), (attended,))
        size = (shape.dim, self._queries(shape) * self._channels(shape))
        return affine(b, merged, "out", size, shape, shape.output_init, self.bias)

    def _heads(self, b: Builder, x: str, name: str, heads: int, shape: Shape) -> str:
        features = b.types[x].width if self.reads_source and name != "q" else shape.dim
        size = (heads * self._channels(shape), features)
        made = affine(b, x, name, size, shape, shape.matrix_init, self.bias)
        if self.qk_norm is not None and self.qk_norm.over == "all" and name != "v":
            made = self.qk_norm.lower(b, made, name)
        return b.add(f"{name}.heads", SplitHeads(heads), (made,))

    def _positioned(self, b: Builder, x: str, name: str, context: LoweringContext, shape: Shape) -> str:
        norm = self.qk_norm if self.qk_norm is not None and self.qk_norm.over == "head" else None
        if norm is not None and not norm.after_rope:
            x = norm.lower(b, x, name)
        rope = self._rope(shape)
        if rope is not None and self.rope is not None:
            op = Rope(self.rope.pairs == "neighbors")
            x = b.add(f"{name}.rope", op, (x, context.shared[rope.name], context.shared[f"{rope.name}:1"]))
        return norm.lower(b, x, name) if norm is not None and norm.after_rope else x

    def _excluded(self, b: Builder, y: str, v: str) -> str:
        return y if self.exclude is None else b.add("y.exclusive", Exclusive(), (y, v))

    def _wired(self, name: str, plain: Callable[[], str], heads: int, context: LoweringContext) -> str:
        """Returns the expression `v` or `y` of the value [B, T, H, C] that `plain` adds, or that value."""
        text: str | None = getattr(self, name)
        if text is None or context.wire is None:
            return plain()
        reads = name in parse_wiring(text).names.values()
        return context.wire(text, f"{name}.wired", {name: plain()} if reads else {}, heads)
