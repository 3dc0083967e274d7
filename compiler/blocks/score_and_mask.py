"""The base class of layers that attend to earlier tokens by a score and a mask. The class also checks the two
expressions, and reads and writes the key-value cache."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isclose
from typing import Annotated, ClassVar

from pydantic import Field

from specc.compiler.blocks.context import LoweringContext, Shape, Shared
from specc.compiler.blocks.document_mask import Documents
from specc.compiler.blocks.parts import Layer
from specc.compiler.blocks.previous import TokenId
from specc.compiler.blocks.rope import RopeTable
from specc.compiler.blocks.wiring import Counts, WiringText, failure, number
from specc.compiler.changing_values import SegmentSchedule, points_of, values_of
from specc.compiler.expr import Const, ExprError, parse, substitute, variables
from specc.compiler.expr.interval import atoms
from specc.compiler.expr.mask import (
    CAUSAL,
    NUMBERS,
    POSITIONS,
    bound_mask,
    parse_mask,
    require_visible,
    sees_later,
    window_of,
)
from specc.compiler.expr.score import PLAIN, bound_score, parse_score
from specc.compiler.expr.values import Read
from specc.compiler.expr.wiring import parse_wiring
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import COMPUTE, TensorType
from specc.compiler.ops.attention import ScoreFields, Sdpa
from specc.compiler.ops.caches.cached_attention import SdpaCached
from specc.compiler.ops.caches.key_value_cache import CacheWrite, ToCodes, coded_types
from specc.compiler.ops.caches.paged_attention import PagedWrite, SdpaPaged
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.sequence import Zeros
from specc.compiler.programs.init import constant, formula, value_of
from specc.compiler.strict import ExprText, Positive, Problem, Unit, accepted_by, later

MaskText = Annotated[ExprText, accepted_by(parse_mask)]


class MaskSchedule(SegmentSchedule):
    """A mask that changes during training."""

    at: Annotated[tuple[tuple[Unit, MaskText], ...], Field(min_length=1, max_length=16)]


# Names that a score, or the functions generated for attention, use for other values.
TAKEN = {"s", *POSITIONS, *NUMBERS, "q", "k", "v", "y", "dy", "lse", "positions", "start", "starts", "sinks"}


class ScoreAndMask(Layer):
    """A layer whose heads attend by a score and a mask.

    Attributes:
        heads: the number of query heads.
        score: the score of a query and a key: an expression of `s`, the scaled product of query and key. The score may
            read the position `i` of the query, the position `j` of the key, the head `h`, the sizes `heads`,
            `kv_heads`, `head_dim`, `values`, `dim`, `context` and `prefix`, `slope(h)` (ALiBi, Press et al., 2022),
            `bucket` (T5, Raffel et al., 2020), and elements of learned tables such as
            `bias[h, bucket(i - j, 32, 128)]`.
        mask: the condition under which a query attends to a key. The mask reads `i`, `j`, `h` and the same sizes as the
            score. An example is `j <= i and i - j < 512`. `document(i) == document(j)` holds within a document. A query
            may attend to a later key only if query and key are in the model's `prefix`, as in `j <= i or j < prefix`.
            The mask may have a schedule.
        scale: the factor of the product of q and k, a number or a formula of `head_dim`, `layer` and `layers`. By
            default, `1/sqrt(head_dim)`.
        sinks: whether each head has a learned logit that is added only to the denominator of the softmax.
        y: the output: an expression of the result `y` of each head.
        bos: the id that begins a document, for `document` in the mask.
    """

    # The fields that may be set only if the layer attends to earlier tokens.
    of_tokens: ClassVar[tuple[str, ...]] = ("score", "mask", "scale", "sinks")

    heads: Positive
    score: ExprText = later(PLAIN)
    mask: MaskText | MaskSchedule = later(CAUSAL)
    scale: Annotated[float | str, formula("head_dim", "layer", "layers")] | None = later(None)
    sinks: bool = later(False)
    y: WiringText | None = later(None)
    bos: TokenId | None = later(None)

    @staticmethod
    def instead() -> Mapping[str, str]:
        hint = "write a mask in attention, for example `j <= i and i - j < 512`"
        return dict.fromkeys(("window", "window_size", "sliding_window"), hint)

    @property
    def reads_source(self) -> bool:
        """Whether the layer attends to the output of an encoder."""
        return "reads_source" in self.traits

    def size(self, dim: int) -> int:
        """Returns the number of channels of q and k per head, in a model of `dim` features."""
        raise TypeError(f"{type(self).__name__} must override `size`")

    @property
    def masks(self) -> tuple[str, ...]:
        return tuple(mask for _, mask in points_of(self.mask))

    def sees_later(self, shape: Shape) -> bool:
        return any(sees_later(self.bound_mask(mask, shape), self.heads) for mask in self.masks)

    def bound_mask(self, mask: str, shape: Shape) -> str:
        """Returns the canonical text of a mask in a model of this shape. Raises ExprError if the mask is invalid in
        this model."""
        return bound_mask(mask, self.heads, shape.context, shape.prefix, tuple(self._sizes(shape).items()))

    def bound_score(self, mask: str, shape: Shape) -> str:
        """Returns the canonical text of the score. `mask` is the canonical text of the mask. Raises ExprError if the
        score is invalid."""
        sizes, visible = self._sizes(shape), self.visible(mask, shape)
        tables = tuple((name, self.learn[name].dims(sizes)) for name in self.tables)
        settings = (self.heads, shape.context, shape.prefix, tuple(sizes.items()))
        return bound_score(self.score, tables, visible, *settings)

    def _sizes(self, shape: Shape) -> Mapping[str, int]:
        return {**shape.sizes, **self.sizes(shape.dim)}

    @property
    def only_masked(self) -> bool:
        """Whether queries attend only to keys that the mask admits."""
        return True

    def visible(self, mask: str, shape: Shape) -> str:
        """Returns the condition under which attention evaluates the score of a query and a key. `mask` is the canonical
        text of the mask."""
        return mask

    def queries(self, shape: Shape) -> int:
        return shape.size("H", self.heads, "heads", self.title)

    def expression_problems(self) -> Iterator[Problem]:
        """Yields the problems of the score and the mask, except problems that depend on the context length."""
        documents = any("document" in mask for mask in self.masks)
        if documents and self.bos is None:
            message = "the mask calls `document`, but `bos`, the id that starts a document, is not set"
            yield Problem(("mask",), "S272", message, "set `bos` to the id that the tokenizer puts before a document")
        if self.bos is not None and not documents and not self.reads_source:
            message = f"`bos` is {self.bos}, but only a mask that calls `document` needs it"
            hint = f"add a condition to the mask: `{self.masks[-1]} and document(i) == document(j)`, or remove `bos`"
            yield Problem(("bos",), "S272", message, hint)
        dims = {name: len(shape) for name, shape in self.tables.items()}
        for name in sorted(dims.keys() & TAKEN):
            message = f"a table cannot have the name `{name}`, because another value of attention has this name"
            yield Problem(("learn", name), "S207", message, "choose another name")
            return
        for name in self.read_as_tables:
            message = f"`score` reads `{name}` as a table, but the `shape` of `{name}` is not a list of dims"
            hint = f"for example `{name}: {{shape: [heads, 32], init: 0}}`"
            yield Problem(("learn", name, "shape"), "S241", message, hint)
        if self.read_as_tables:
            return
        try:
            expr = parse_score(self.score, dims)
        except ExprError as error:
            hint = error.hint or "write an expression of s"
            yield Problem(("score",), "S271", error.message, hint, offset=error.column)
            return
        for name in dims:
            if name not in {part.table for part in atoms(expr) if isinstance(part, Read)}:
                message = f"`score` does not read the table `{name}`"
                yield Problem(
                    ("learn", name), "S247", message, f"read an element of `{name}` in `score`, or remove `{name}`"
                )

    def indivisible(self, dim: int) -> Problem:
        hint = f"choose a divisor of {dim}, or set `head_dim`"
        return Problem(("heads",), "S210", f"`heads` is {self.heads}, which does not divide the width {dim}", hint)

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        yield from self.expression_problems()
        if not shape.causal or self.reads_source:
            for name in self.of_tokens:
                if getattr(self, name) != type(self).model_fields[name].default:
                    message = (
                        f"`{name}` applies only to attention to earlier tokens, but this layer attends to a whole line"
                    )
                    yield Problem((name,), "S275", message, f"remove `{name}`")
            return
        hint, where = "change the formula; layers are counted from 0", f"in layer {shape.layer}, "
        yield from failure(lambda: self._scale(shape), ("scale",), "S216", hint, where)
        steps = (self._mask_problems, self.visible_problems, self._score_problems)
        yield from next(filter(None, (tuple(step(shape)) for step in steps)), ())

    def _mask_problems(self, shape: Shape) -> Iterator[Problem]:
        for path, mask in values_of("mask", self.mask):
            yield from failure(partial(self._check_mask, mask, shape), path, "S276", "write a simpler mask")

    def _check_mask(self, mask: str, shape: Shape) -> None:
        bound = self.bound_mask(mask, shape)
        if self.only_masked and bound != CAUSAL:
            require_visible(bound, self.heads, shape.context)

    def visible_problems(self, shape: Shape) -> Iterator[Problem]:
        yield from ()

    def _score_problems(self, shape: Shape) -> Iterator[Problem]:
        sizes = self._sizes(shape)
        if self.read_as_tables or any(any(self.learn[name].size_problem(sizes)) for name in self.tables):
            return  # reported by the block
        for mask in self.masks:
            score = partial(self.bound_score, self.bound_mask(mask, shape), shape)
            yield from failure(score, ("score",), "S271", "write a simpler score")

    @property
    def tables(self) -> Mapping[str, Counts]:
        return {name: value.shape for name, value in self.learn.items() if isinstance(value.shape, tuple)}

    @property
    def read_as_tables(self) -> tuple[str, ...]:
        """The learned values that the score reads as tables although their shapes are not lists of dims."""
        return tuple(n for n in self.learn if n not in self.tables and re.search(rf"\b{n}\s*\[", self.score))

    @property
    def own_values(self) -> tuple[str, ...]:
        return (*self.tables, *self.read_as_tables)

    def score_fields(self, shape: Shape) -> ScoreFields:
        mask = self.bound_mask(self.masks[-1], shape)
        scale = None if self._layered else self._scale(shape)
        usual = scale is not None and isclose(scale, self.size(shape.dim) ** -0.5, rel_tol=1e-12)
        score = self.bound_score(mask, shape)
        return ScoreFields(score, mask, None if usual else scale, tuple(self.tables), self.sinks)

    @property
    def _layered(self) -> bool:
        """Whether the scale depends on the layer. q is then multiplied by the scale before attention, so that layers
        can share one function."""
        return isinstance(self.scale, str) and "layer" in variables(parse(self.scale))

    def _scale(self, shape: Shape) -> float | None:
        values = {"head_dim": self.size(shape.dim), "layer": shape.layer, "layers": shape.layers}
        return None if self.scale is None else value_of(self.scale, **{name: float(n) for name, n in values.items()})

    def ring(self, shape: Shape) -> tuple[int, int] | None:
        """Returns two numbers: the number of first positions that the cache stores, and the number of last positions.
        Returns None if the cache stores all positions."""
        if self.reads_source or shape.page or not isinstance(shape.cache_length, str):
            return None
        fields = self.score_fields(shape)
        return window_of(fields.mask, self.heads, shape.context)

    @property
    def documents(self) -> Documents | None:
        return None if self.bos is None else Documents(f"documents{self.bos}", ("starts",), mark=self.bos)

    def rope_table(self, shape: Shape) -> RopeTable | None:
        """Returns the table of the rotary angles, or None without rotary positions."""
        raise TypeError(f"{type(self).__name__} must override `rope_table`")

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        return tuple(value for value in (self.rope_table(shape), self.documents) if value is not None)

    def rows(self, shape: Shape, *dims: int) -> TensorType:
        """Returns the type of a cache with values [*dims] per position: [B, positions, *dims], or [P, page, *dims]
        with pages."""
        ring = self.ring(shape)
        positions = "S" if self.reads_source else shape.cache_length if ring is None else sum(ring)
        return TensorType(("P", shape.page, *dims) if shape.page else ("B", positions, *dims), COMPUTE)

    def caches(self, shape: Shape, **rows: TensorType) -> Mapping[str, TensorType]:
        """Returns the types of the tensors of a cache, by key. The arguments `rows` are the types of the cached rows,
        by name. The cache holds the rows themselves, or codes and scales of the rows."""
        if not shape.coded:
            return rows
        coded = {name: coded_types(type) for name, type in rows.items()}
        scales = {f"{name}_scale": scale for name, (_, scale) in coded.items()}
        return {name: codes for name, (codes, _) in coded.items()} | scales

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        begun = {}
        for key, type in self.state(shape).items():
            dims = tuple(dim for dim in type.shape[1:] if isinstance(dim, int))
            begun[key] = b.add(f"{key}.cache", Zeros(dims), (context.memory,))
        return begun

    def written(self, b: Builder, rows: Mapping[str, str], shape: Shape, context: LoweringContext) -> dict[str, str]:
        """Adds the nodes that write rows to the caches.

        Args:
            b: The builder of the function.
            rows: The rows of the input tokens, [B, T, G, C], by the name of the cache.
            shape: The sizes of the model.
            context: The cache and the positions of the program.

        Returns:
            The new state, by the name of the cache.
        """
        ring = self.ring(shape)
        write, word = PagedWrite() if context.table else CacheWrite(ring), "cache" if ring is None else "ring"
        where = tuple(filter(None, (context.positions, context.table)))
        return {name: b.add(f"{name}.{word}", write, (context.cache[name], x, *where)) for name, x in rows.items()}

    def attend(
        self,
        b: Builder,
        q: str,
        rows: Mapping[str, str],
        shape: Shape,
        context: LoweringContext,
        fields: ScoreFields,
        values: int | None = None,
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the attention op of a program: without a cache, with a cache, or with a paged cache.

        The rows of the input tokens are written to the cache before the op. In a ring buffer, the rows are written
        after the op, because the new rows replace older rows that the op reads.

        Args:
            b: The graph, to which the op is added.
            q: The queries [B, T, H, C].
            rows: The rows of the input tokens, by the name of the cache: keys [B, T, G, C] and values [B, T, G, D], or
                rows that are both keys and values.
            shape: The sizes of the model.
            context: The cache and the positions of the program.
            fields: The score, the mask and the tables of the layer.
            values: The number of leading features of a cached key that form the value. None if values are cached
                separately.

        Returns:
            The name of the result [B, T, H, D], and the new state of the cache.
        """
        further = tuple(self.further(b, fields, shape, context))
        settings = fields.of_scores
        if not context.cache:
            return b.add("y", Sdpa(*settings), (q, *rows.values(), *further)), {}
        ring, stored = self.ring(shape), tuple(rows)
        if shape.coded:
            codes = {name: b.add(f"{name}.codes", ToCodes(), (value,)) for name, value in rows.items()}
            rows = codes | {f"{name}_scale": f"{value}:1" for name, value in codes.items()}
        state = self.written(b, rows, shape, context) if ring is None else {}
        read = [(state or context.cache)[name] for name in rows]
        where = tuple(filter(None, (context.positions, context.table)))
        new = rows.values() if ring is not None else ()
        op = (SdpaPaged if context.table else SdpaCached)(*settings, values, shape.coded, ring)
        y = b.add("y", op, (q, *read[: len(stored)], *where, *read[len(stored) :], *new, *further))
        return y, state or self.written(b, rows, shape, context)

    def further(self, b: Builder, form: ScoreFields, shape: Shape, context: LoweringContext) -> Iterator[str]:
        """Yields the inputs of attention after q, k and v: the first positions of documents, the sinks, and the tables.

        Args:
            b: The builder of the function.
            form: The settings of the attention op, which determine the inputs that the op reads.
            shape: The sizes of the model.
            context: The values that the layer can read.
        """
        if form.documents:
            assert self.documents is not None
            yield context.shared[self.documents.name]
        if self.sinks:
            yield b.param("sinks", shape.activation(self.queries(shape)), constant(0.0))
        sizes = {**self.sizes(shape.dim), "heads": self.queries(shape)}
        for name in form.tables:
            yield self.learn[name].declare(b, name, shape.of_attention(sizes))

    def scaled(self, b: Builder, q: str, shape: Shape) -> str:
        if not self._layered:
            return q
        formula = substitute(parse(str(self.scale)), {"head_dim": Const(self.size(shape.dim))})
        text, numbers = number(b, f"({formula}) * sqrt({self.size(shape.dim)})", "attention_scale", shape)
        return pointwise(b, "q.scaled", f"q * {text}", q=q, **numbers)

    def wired(self, name: str, plain: Callable[[], str], heads: int, context: LoweringContext) -> str:
        """Returns the result of the expression in a field of the layer.

        Args:
            name: The name of the field.
            plain: A function that adds the node of the value that the expression reads, and returns this value.
            heads: The number of heads H.
            context: The values that the layer can read.

        Returns:
            The result of the expression, [B, T, H, C]. Without an expression, the result of `plain`.
        """
        text: str | None = getattr(self, name)
        if text is None or context.wire is None:
            return plain()
        reads = name in parse_wiring(text).names.values()
        return context.wire(text, f"{name}.wired", {name: plain()} if reads else {}, heads)
