"""Scaled dot-product attention: over a whole sequence, over a key-value cache, under a padding mask.

Specs lower to these ops. The fusion pass replaces those that train by the ops of `saved_attention`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.expr import torch_text, torch_value, variables
from specc.compiler.expr.mask import CAUSAL, Mask, sees_itself
from specc.compiler.expr.python_lines import fitted
from specc.compiler.expr.score import PLAIN, Score
from specc.compiler.expr.values import Expr, Read
from specc.compiler.ir.graph import (
    Dim,
    Input,
    Op,
    Sizes,
    TensorType,
    TorchCall,
    TypeRuleError,
)
from specc.compiler.ops.key_value_cache import ring_positions

if TYPE_CHECKING:
    from torch import Tensor


def scaled_product(q: "Tensor", k: "Tensor", scale: float | None = None) -> "Tensor":
    """Returns q k^T times `scale`, or divided by sqrt(C) if it is None, as [B, H, T, S]."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    product = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    return product / q.shape[-1] ** 0.5 if scale is None else product * scale


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Base of attention: softmax(score) v for q [B, T, H, C] and k, v [B, S, G, C], where G divides H.

    The score is q k^T / sqrt(C) unless a subclass changes it. Subclasses differ in the keys that a query attends to. A
    query that attends to no key has output 0, as in Torch.
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

    def scores(self, *inputs: "Tensor") -> "Tensor":
        """Returns the scores [B, H, T, S], masked or not."""
        return scaled_product(inputs[0], inputs[1])

    def sink(self, *inputs: "Tensor") -> "Tensor | None":
        """Returns the logit of each head [H] that is added to the denominator of the softmax; None if there is none."""
        return None

    def logits(self, *inputs: "Tensor") -> "tuple[Tensor, Tensor]":
        """Returns the masked scores, with the sink as the last column if there is one, and bool[..., T, 1]: the queries
        that have neither a key nor a sink. Their scores are not masked."""
        import torch

        allowed, sink = self.allowed(*inputs), self.sink(*inputs)
        blind = ~allowed.any(-1, keepdim=True) if sink is None else allowed.new_zeros(1, 1)
        scores = self.scores(*inputs).masked_fill(~(allowed | blind), float("-inf"))
        if sink is not None:
            column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), -1)
        return scores, blind

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        q, k, v = inputs[:3]
        v = v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)
        scores, blind = self.logits(*inputs)
        weights = scores.softmax(-1).masked_fill(blind, 0.0)[..., : k.shape[1]]
        attended: Tensor = weights.to(v.dtype) @ v.transpose(1, 2)
        return attended.transpose(1, 2)


LONGEST_TITLE = 60


_WORDS = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?|//|\*\*|[<>=!]=|[-+*/%<>]")


_SYMBOLS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "//": "div", "%": "mod",
    "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne",
}  # fmt: skip


_SAME_DOCUMENT = "document(i) == document(j)"


@dataclass(frozen=True, slots=True)
class AttendContext:
    """The context of templates/torch/ops/attend_scored.py.jinja and attend_scored_cached.py.jinja.

    Attributes:
        function: the name of the function.
        summary: the docstring of the file.
        doc: the first sentence of the docstring of the function, as lines.
        signature: the first line of the function.
        visible: the first line of the function of the mask.
        mask: the lines of its body.
        scored: the first line of the function of the score; empty if the score is s.
        score: the lines of its body.
        eager: the lines that compute y from q, k and v [B, heads, tokens, C] and the positions i and j.
        tiles: the lines that find the blocks of which some pair, and every pair, is not masked.
        rows: the number of rows of the tables of blocks.
        read: the value that the tables depend on.
        seen_pair: the mask of a pair, for FlexAttention.
        flex: the lines that compute y with FlexAttention.
        keys: the sentence on the keys of a cache.
        places: the lines that find the positions i and j, of a cache.
        package: the package of the model, for the names of custom ops.
    """

    function: str
    summary: str
    doc: tuple[str, ...]
    signature: str
    visible: str
    mask: tuple[str, ...]
    scored: str
    score: tuple[str, ...]
    eager: tuple[str, ...]
    tiles: tuple[str, ...] = ()
    rows: str = ""
    read: str = ""
    seen_pair: str = ""
    flex: tuple[str, ...] = ()
    keys: str = ""
    places: tuple[str, ...] = ()
    package: str = ""


@dataclass(frozen=True, slots=True)
class ScoreFields(Op):
    """The settings of causal attention with a score and a mask as expressions.

    Attributes:
        score: the canonical text of the score; see expr/score.py.
        mask: the canonical text of the mask; see expr/mask.py.
        scale: the factor of q k^T; 1 / sqrt(C) if unset.
        tables: the names of the tables that the score reads.
        sinks: whether the denominator of the softmax has a further term exp(sink) per head.
    """

    score: str = PLAIN
    mask: str = CAUSAL
    scale: float | None = None
    tables: tuple[str, ...] = ()
    sinks: bool = False

    @property
    def documents(self) -> bool:
        """Whether the mask reads documents."""
        return "document" in self.mask

    @property
    def causal(self) -> bool:
        """Whether it is causal attention with no other score, mask or sink."""
        return (self.score, self.mask, self.scale, self.sinks) == (PLAIN, CAUSAL, None, False)

    @property
    def further(self) -> tuple[str, ...]:
        """The names of the inputs after those of the op, in this order: with a mask of documents, the start positions
        of the queries' documents i64[B, T]; with `sinks`, a logit of each head [H]; the tables."""
        return (*(("start",) if self.documents else ()), *(("sinks",) if self.sinks else ()), *self.tables)

    @property
    def title(self) -> str:
        """The score and the mask as part of a name, where d is i - j: `s_sub_slope_h_mul_d`, `d_lt_512`."""
        mask = self.mask.removeprefix(f"{CAUSAL} and ").replace(_SAME_DOCUMENT, "document")
        texts = [self.score if self.score != PLAIN else "", mask if self.mask != CAUSAL else ""]
        texts += [f"scale {self.scale:g}" if self.scale is not None else "", "sinks" if self.sinks else ""]
        words = (_SYMBOLS.get(word, word) for text in texts for word in _WORDS.findall(text.replace("i - j", "d")))
        title = "_".join(words).replace(".", "p")
        return title if len(title) <= LONGEST_TITLE else title[:LONGEST_TITLE].rpartition("_")[0]

    @property
    def description(self) -> str:
        """The score, the mask and the rest as text for people."""
        scale = f"scale {self.scale:g}" if self.scale is not None else ""
        score = f"score {self.score}" if self.score != PLAIN else ""
        return ", ".join(filter(None, (score, f"where {self.mask}", scale, "a sink per head" if self.sinks else "")))

    def parsed(self, heads: Dim) -> tuple[Score, Mask]:
        """Returns the score and the mask for a number of query heads."""
        assert isinstance(heads, int)
        return Score.of(self.score, self.tables, int(heads)), Mask.of(self.mask, int(heads))

    def check_further(self, q: TensorType, types: Sequence[TensorType], place: int) -> None:
        """Raises TypeRuleError if the further inputs, from number `place` on, do not match q."""
        for i, (name, type) in enumerate(zip(self.further, types, strict=True), place):
            if name == "start" and type != TensorType(q.shape[:2], "i64"):
                raise TypeRuleError(f"attends with q {q}, whose documents start at {type}", (0, i))
            if name == "sinks" and type.shape != q.shape[-2:-1]:
                raise TypeRuleError(f"has sinks {type} for q {q}", (0, i))


@dataclass(frozen=True, slots=True)
class ScoredBase(ScoreFields, Attention):
    """Base of causal attention with a score and a mask. The further inputs follow those of the subclass."""

    first: ClassVar[int] = 3  # the number of inputs before the further ones

    @property
    def arity(self) -> int:
        return self.first + len(self.further)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        self.check_further(inputs[0], inputs[self.first :], self.first)
        return Attention.infer(self, inputs)

    def named(self, inputs: "Sequence[Tensor]") -> "dict[str, Tensor]":
        """Returns the further inputs by name."""
        return dict(zip(self.further, inputs[self.first :], strict=True))

    def positions(self, *inputs: "Tensor") -> "tuple[Tensor, Tensor]":
        """Returns the positions of the queries [T, 1] and of the keys [S]."""
        raise TypeRuleError(f"{self.name} does not say where its tokens are")

    def _values(self, *inputs: "Tensor") -> "dict[str, Tensor | float]":
        import torch

        i, j = self.positions(*inputs)
        h = torch.arange(inputs[0].shape[-2], device=i.device)[:, None, None]
        named = self.named(inputs)
        if self.documents:
            named["start"] = named["start"][:, None, :, None]
        return {"i": i, "j": j, "h": h, **named}

    def allowed(self, *inputs: "Tensor") -> "Tensor":
        _, mask = self.parsed(inputs[0].shape[-2])
        return torch_value(mask.condition, self._values(*inputs)).expand(*_common(mask, inputs[0], inputs[1]))

    def scores(self, *inputs: "Tensor") -> "Tensor":
        import torch

        score, _ = self.parsed(inputs[0].shape[-2])
        s = scaled_product(inputs[0], inputs[1], self.scale)
        if score.plain:
            return s
        wide = torch.promote_types(s.dtype, torch.float32)
        values = self._values(*inputs)
        values |= {name: value.to(wide) for name, value in values.items() if isinstance(value, torch.Tensor)}
        values["s"] = s.to(wide)
        values |= {read.variable: torch_value(Read(read.table, read.indices), values) for read in score.reads}
        return torch_value(score.value, values)

    def sink(self, *inputs: "Tensor") -> "Tensor | None":
        return self.named(inputs)["sinks"] if self.sinks else None

    def attend_call(self, inputs: Sequence[TensorType]) -> TorchCall:
        """Returns the call of the function of this attention, which is generated for it."""
        score, mask = self.parsed(inputs[0].shape[-2])
        function = f"attend{'_cached' if self.first == 4 else ''}_{self.title}"
        parameters = ["q", "k", "v", *(("positions",) if self.first == 4 else ()), *self.further]
        tables = "".join(f", {name}" for name in self.tables)
        scored = not score.plain
        doc = "Attention of q [B, T, H, C] over k, v [B, T, G, C]"
        if self.first == 4:
            doc = "Attention of q [B, T, H, C] at `positions` over cached k, v [B, S, G, C]"
        context = AttendContext(
            function=function,
            summary="\n".join(wrap(f'"""Attention, {self.description}."""', 110, break_long_words=False)),
            doc=tuple(wrap(f'"""{doc}, {self.description}.', 106, break_long_words=False)),
            signature=_signature(function, parameters),
            visible=_signature("visible", ("i", "j", "h", *(("start",) if self.documents else ()))),
            mask=_statement("return", torch_text(mask.condition, whole=True)),
            scored=_signature("scored", ("s", "i", "j", "h", *self.tables)) if scored else "",
            score=_statement("return", torch_text(score.value, score.elements())),
            **self._places(scored, mask, tables),  # type: ignore[arg-type]
        )
        template = f"torch/ops/attend_scored{'_cached' if self.first == 4 else ''}.py.jinja"
        return TorchCall(function, tuple(map(Input, range(self.arity))), generated=(template, context))

    def _eager(self, scored: bool, start: str, tables: str) -> tuple[str, ...]:
        """Returns the lines that compute y from all scores."""
        lines = ["h = torch.arange(q.shape[1], device=q.device)[:, None, None]"]
        seen = f"visible(i, j, h{start and ', start[:, None, :, None]'})"
        lines.append(f"seen = {seen}")
        # with a mask, Torch's kernels that do not store the scores have as many heads of keys as of queries
        lines += ["k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))"]
        if not scored and not self.sinks:
            scale = f", scale={self.scale!r}" if self.scale is not None else ""
            return *lines, f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen{scale})"
        product = "q @ k.mT / q.shape[3] ** 0.5" if self.scale is None else f"q @ k.mT * {self.scale!r}"
        lines.append(f"s = {product}")
        blind = not self.sinks and not sees_itself(self.mask)
        lines += ["blind = ~seen.any(-1, keepdim=True)  # queries that attend to no key"] if blind else []
        hidden = "~(seen | blind)" if blind else "~seen"
        lines.append(f"s = {f'scored(s, i, j, h{tables})' if scored else 's'}.masked_fill({hidden}, -torch.inf)")
        if self.sinks:
            lines.append("s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), -1)")
        weights = f"s.softmax(-1){'.masked_fill(blind, 0.0)' if blind else '[..., :-1]' if self.sinks else ''}"
        return *lines, f"y = {weights}.to(v.dtype) @ v"

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        """Returns the fields of the context that differ between whole sequences and caches."""
        raise TypeRuleError(f"{self.name} does not say where its tokens are")


def _signature(function: str, parameters: Sequence[str]) -> str:
    """Returns the first line of a function of tensors, broken at its brackets if it is long."""
    items = [f"{name}: Tensor" for name in parameters]
    line = f"def {function}({', '.join(items)}) -> Tensor:"
    if len(line) <= 110:
        return line
    return f"def {function}(\n    {', '.join(items)}\n) -> Tensor:"


def _statement(head: str, text: str) -> tuple[str, ...]:
    """Returns a statement as lines of at most 110 columns behind an indent of four."""
    return fitted(f"{head} {text}", 106)


def _tile_lines(name: str, condition: Expr) -> tuple[str, ...]:
    text = torch_text(condition, whole=True)
    return _statement(f"{name} =", text if variables(condition) else f"torch.full_like(i0 <= j0, {text})")


def _common(mask: Mask, q: "Tensor", k: "Tensor") -> tuple[int, ...]:
    """Returns the shape of the values of a mask."""
    names = variables(mask.condition)
    rows, heads = (len(q) if "start" in names else 1), (q.shape[-2] if "h" in names else 1)
    lead = (rows, heads) if "start" in names or "h" in names else ()
    return (*lead, q.shape[1], k.shape[1])


@dataclass(frozen=True, slots=True)
class Sdpa(ScoredBase):
    """Causal attention over a whole sequence, from q, k, v and the further inputs."""

    name: ClassVar[str] = "sdpa"

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q = inputs[0]
        tokens = q.with_shape(q.shape[1]).count(sizes)
        return 4 * q.count(sizes) // tokens * self.parsed(q.shape[-2])[1].pairs(tokens)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        if self.causal:
            return TorchCall("attend", tuple(map(Input, range(3))))
        return self.attend_call(inputs)

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        starts = ["start0, start1 = x[:, first, None], x[:, last, None]"] if self.documents else []
        settings = ["block_mask=mask", "enable_gqa=True"]
        settings += ["score_mod=score"] if scored else []
        settings += [f"scale={self.scale!r}"] if self.scale is not None else []
        flex = []
        if scored:
            flex += ["def score(s: Tensor, row: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:"]
            flex += [f"    return scored(s, i, j, h{tables})", ""]
        flex += [f"tables = blocks({'start' if self.documents else 'q.transpose(1, 2)'}, size)"]
        flex += ["mask = BlockMask((tokens, tokens), *tables, BLOCK_SIZE=(size, size), mask_mod=seen)"]
        if self.sinks:
            flex += [f"y, lse = flex_attention(q, k, v, {', '.join(settings)}, return_lse=True)"]
            flex += ["y = y * torch.sigmoid(lse - sinks[:, None]).to(y.dtype).unsqueeze(-1)"]
        else:
            flex += [f"y = flex_attention(q, k, v, {', '.join(settings)})"]
        return {
            "eager": (
                "i, j = position[:, None], position",
                *self._eager(scored, "start" if self.documents else "", tables),
            ),
            "tiles": (*starts, *_tile_lines("some", mask.any), *_tile_lines("every", mask.all)),
            "rows": "len(x)" if self.documents else "1",
            "read": "x i64[B, T], the starts of documents" if self.documents else "x [B, T, ...]",
            "seen_pair": f"visible(i, j, h{', start[row, i]' if self.documents else ''})",
            "flex": tuple(flex),
        }

    def positions(self, *inputs: "Tensor") -> "tuple[Tensor, Tensor]":
        import torch

        row, column = (torch.arange(x.shape[1], device=x.device) for x in inputs[:2])
        return row.unsqueeze(1), column


@dataclass(frozen=True, slots=True)
class SdpaCached(ScoredBase):
    """Attention of q [B, T, H, C] at `positions` (i64[T]) over a key-value cache k, v [B, S, G, C].

    Without `ring`, row j of the cache is position j, and rows after a query's position are ignored. With a ring (first,
    window), k and v are the outputs of `RingKeys`: the rows of a ring before the queries, followed by the queries' own.
    The further inputs follow the positions.
    """

    name: ClassVar[str] = "sdpa_cached"
    first: ClassVar[int] = 4
    ring: tuple[int, int] | None = None

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        if self.causal:
            return TorchCall("attend_cached", tuple(map(Input, range(4))))
        return self.attend_call(inputs)

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        eager = ("i = positions[:, None]", *self._eager(scored, "start" if self.documents else "", tables))
        if self.ring is None:
            keys = "Row j of the cache is position j. Rows behind a query are masked."
            return {"eager": eager, "keys": keys, "places": ("j = torch.arange(k.shape[2], device=k.device)",)}
        first, window = self.ring
        kept = (
            f"the first {first} positions and the last {window} after them" if first else f"the last {window} positions"
        )
        row = f"torch.where(row < {first}, row, last)" if first else "last"
        empty = f"(held >= begin) | (row >= {first}) & (last < {first})" if first else "held < 0"
        return {
            "eager": eager,
            "keys": f"k and v are the rows of a ring, which holds {kept}, then those of the queries.",
            "places": (
                "row, begin = torch.arange(k.shape[2] - len(positions), device=k.device), positions[0]",
                f"last = begin - 1 - (begin - 1 - row) % {window}  # the position in each row of the window",
                f"held = {row}",
                f"empty = {empty}",
                "j = torch.cat((torch.where(empty, positions[-1] + 1, held), positions))",
            ),
        }

    def positions(self, *inputs: "Tensor") -> "tuple[Tensor, Tensor]":
        import torch

        _, k, _, positions = inputs[:4]
        if self.ring is None:
            return positions.unsqueeze(1), torch.arange(k.shape[1], device=k.device)
        return positions.unsqueeze(1), torch.cat((ring_positions(*self.ring, int(positions[0])), positions.cpu())).to(
            k.device
        )


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
