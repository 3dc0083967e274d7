"""Scaled dot-product attention: over a whole sequence, over a key-value cache, under a padding mask.

`Attention` and its subclasses are the ops that specs lower to. The fusion pass replaces those that train by
`SavedAttention`, which kernels compute and which saves the log-sum-exp for `SavedAttentionGrad`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.expr import torch_text, torch_value, variables
from specc.compiler.expr.mask import CAUSAL, Mask, sees_itself
from specc.compiler.expr.python_lines import fitted
from specc.compiler.expr.score import PLAIN, Score
from specc.compiler.expr.values import Expr, Read
from specc.compiler.ir.graph import (
    Dim,
    Gradients,
    Input,
    Op,
    Sizes,
    Tape,
    TensorType,
    TorchCall,
    TypeRuleError,
    output_ref,
)

if TYPE_CHECKING:
    from torch import Tensor

SCORES = 1 << 24  # number of scores that a reference holds at a time


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


def ring_positions(first: int, window: int, start: int) -> "Tensor":
    """Returns the position in each row of a ring, i64[first + window], before token `start`.

    The ring holds the first positions, and the last `window` of those after them. An empty row has a position after
    all others, which no mask allows.
    """
    import torch

    rows = [1 << 40] * (first + window)
    for position in range(start):
        rows[position if position < first else first + (position - first) % window] = position
    return torch.tensor(rows)


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
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    planned: ClassVar[bool] = True
    mixes_tokens: ClassVar[bool] = True
    chained: ClassVar[int] = 2  # two products in sequence: the scores, then the weights times the values
    output_labels: ClassVar[tuple[str, ...]] = ("y", "lse")

    @property
    def plain(self) -> Attention:
        """The attention without the log-sum-exp, which has the same inputs."""
        raise TypeRuleError(f"{self.name} has no attention")

    @property
    def by_rows(self) -> int:
        """The number of inputs that have rows. The others are parameters."""
        return self.arity

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
        for some in _by_sequences(inputs, self.by_rows, inputs[0], inputs[1]):
            scores, blind = self.plain.logits(*some)
            lse = scores.to(wide).logsumexp(-1).masked_fill(blind.squeeze(-1), 0.0)
            outputs.append((self.plain.reference(*some), lse))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    def gradients(self, tape: Tape, grad: Op) -> Gradients:
        """Adds the node of the gradient `grad`. Further inputs that have rows, such as a mask, have no gradient."""
        read = (*map(tape.input, range(3)), tape.output(0), tape.output(1), *map(tape.input, range(3, self.arity)))
        dq = tape.add("grad", grad, (tape.grad(), *read))
        learned = (output_ref(dq, i) for i in range(3, 3 + self.arity - self.by_rows))
        return dq, output_ref(dq, 1), output_ref(dq, 2), *[None] * (self.by_rows - 3), *learned


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

    @property
    def forward(self) -> SavedAttention:
        """The op whose gradients these are."""
        raise TypeRuleError(f"{self.name} has no forward")

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv"

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
        learned = mask[self.forward.by_rows - 3 :]
        return q, k, v, *(replace(type, dtype="f32") for type in learned)

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

        outputs, rows = [], self.forward.by_rows
        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        for dy, *values in _by_sequences((*inputs[:4], *inputs[6:]), rows + 1, inputs[1], inputs[2]):
            leaves = [value.detach().requires_grad_() for value in (*values[:3], *values[rows:])]
            with torch.enable_grad():
                y = self.forward.plain.reference(*leaves[:3], *values[3:rows], *leaves[3:])
            outputs.append(torch.autograd.grad(y, leaves, dy))
        gradients = list(zip(*outputs, strict=True))
        return *map(torch.cat, gradients[:3]), *(sum(part.to(wide) for part in parts) for parts in gradients[3:])


@dataclass(frozen=True, slots=True)
class CausalAttention(SavedAttention):
    """Sdpa without a window, with its log-sum-exp."""

    name: ClassVar[str] = "causal_attention"
    words: ClassVar[str] = "causal attention"
    arity: ClassVar[int] = 3
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    @property
    def plain(self) -> Attention:
        return Sdpa()

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, CausalAttentionGrad())


@dataclass(frozen=True, slots=True)
class CausalAttentionGrad(SavedAttentionGrad):
    """The gradients of CausalAttention."""

    name: ClassVar[str] = "causal_attention_grad"
    arity: ClassVar[int] = 6

    @property
    def forward(self) -> SavedAttention:
        return CausalAttention()


@dataclass(frozen=True, slots=True)
class ScoredAttention(ScoreFields, SavedAttention):
    """Sdpa with any score and mask, with its log-sum-exp, to which a sink belongs.

    The inputs after q, k and v are the further inputs of `ScoreFields`. A query that attends to no key has the sink as
    its log-sum-exp, if there is one.
    """

    name: ClassVar[str] = "scored_attention"

    @property
    def words(self) -> str:
        return f"attention, {self.description}"

    @property
    def arity(self) -> int:
        return 3 + len(self.further)

    @property
    def input_labels(self) -> tuple[str, ...]:
        return "q", "k", "v", *self.further

    @property
    def by_rows(self) -> int:
        return 3 + self.documents

    @property
    def plain(self) -> Attention:
        return Sdpa(self.score, self.mask, self.scale, self.tables, self.sinks)

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return f"{self.name}_{self.title}", _heads_size(inputs[0], inputs[1])

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return IDS

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Replaces random ids by starts of documents."""
        return [starts_of(x) if self.documents and i == 3 else x for i, x in enumerate(inputs)]

    def derivative(self, tape: Tape) -> Gradients | None:
        return self.gradients(tape, ScoredAttentionGrad(self.score, self.mask, self.scale, self.tables, self.sinks))


@dataclass(frozen=True, slots=True)
class ScoredAttentionGrad(ScoreFields, SavedAttentionGrad):
    """The gradients of ScoredAttention: dq, dk, dv, then f32 those of the sinks and of the tables.

    With dscore as ds in `SavedAttentionGrad`: the gradient of s is dscore times the derivative of the score by s, that
    of an element of a table is the sum of dscore times the derivative by it over the scores that read it, and that of a
    sink is -sum(exp(sink - lse) sum(dy y)).
    """

    name: ClassVar[str] = "scored_attention_grad"

    @property
    def arity(self) -> int:
        return 6 + len(self.further)

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "dq", "dk", "dv", *(f"d{name}" for name in self.further if name != "start")

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return IDS

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        started = [starts_of(x) if self.documents and i == 6 else x for i, x in enumerate(inputs)]
        dy, q, k, v, _, _, *further = started
        y, lse = self.forward.reference(*(x.float() if x.is_floating_point() else x for x in (q, k, v, *further)))
        return dy, q, k, v, y.to(q.dtype), lse, *further

    @property
    def forward(self) -> SavedAttention:
        return ScoredAttention(self.score, self.mask, self.scale, self.tables, self.sinks)


@dataclass(frozen=True, slots=True)
class SeenAttention(SavedAttention):
    """SdpaSeen with its log-sum-exp."""

    name: ClassVar[str] = "seen_attention"
    words: ClassVar[str] = "attention to what is seen"
    arity: ClassVar[int] = 4
    input_labels: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seen")

    @property
    def plain(self) -> Attention:
        return SdpaSeen()

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

    @property
    def forward(self) -> SavedAttention:
        return SeenAttention()

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 2


IDS = 20  # the mean length of random documents


def starts_of(ids: "Tensor") -> "Tensor":
    """Returns the start position of each token's document i64[B, T], where a document starts at each id 0."""
    import torch

    return torch.where(ids == 0, torch.arange(ids.shape[1], device=ids.device), 0).cummax(1).values


SeenOp = SeenAttention | SeenAttentionGrad


def _lse_type(q: TensorType) -> TensorType:
    rows, tokens, heads, _ = q.shape
    return TensorType((rows, heads, tokens), "f32")


def _heads_size(q: TensorType, k: TensorType) -> str:
    return f"h{q.shape[-2]}_g{k.shape[-2]}_c{q.width}"


def _by_sequences(values: "Sequence[Tensor]", rows: int, q: "Tensor", k: "Tensor") -> "Iterator[Sequence[Tensor]]":
    """Yields slices of the first `rows` values with as many sequences as fit SCORES scores, and the other values.

    Yields one empty slice if there are none.
    """
    step = max(1, SCORES // max(1, q.shape[1] * q.shape[2] * k.shape[1]))
    for i in range(0, max(1, len(q)), step):
        yield [value[i : i + step] if place < rows else value for place, value in enumerate(values)]


@dataclass(frozen=True, slots=True)
class CacheWrite(Op):
    """Replaces rows `positions` (i64[T]) of a cache [B, S, G, C] by x [B, T, G, C], in place.

    With a ring (first, window), the cache has first + window rows. Position p has row p below `first`, and row first +
    (p - first) % window from there on, so that a token replaces the one `window` tokens before it.
    """

    name: ClassVar[str] = "cache_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    arity: ClassVar[int] = 3
    flops_per_output: ClassVar[int] = 0
    ring: tuple[int, int] | None = None

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x, _ = inputs
        if cache.shape[2:] != x.shape[2:] or (self.ring is not None and cache.shape[1] != sum(self.ring)):
            raise TypeRuleError(f"writes {x} to a cache {cache}", (0, 1))
        return (cache,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        if self.ring is not None:
            return TorchCall("write_ring", (Input(0), Input(1), Input(2), *self.ring))
        return TorchCall(".index_copy_", (Input(0), 1, Input(2), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        cache, x, positions = inputs
        first, window = self.ring or (cache.shape[1], 1)
        written = cache.clone()
        for row, position in enumerate(positions.tolist()):
            written[:, position if position < first else first + (position - first) % window] = x[:, row]
        return written


@dataclass(frozen=True, slots=True)
class RingKeys(Op):
    """The rows of a ring cache [B, R, G, C], followed by those of x [B, T, G, C], as [B, S, G, C]."""

    name: ClassVar[str] = "ring_keys"
    inline: ClassVar[bool] = False  # the cache is overwritten after this node
    arity: ClassVar[int] = 2
    flops_per_output: ClassVar[int] = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x = inputs
        if cache.shape[2:] != x.shape[2:]:
            raise TypeRuleError(f"reads {x} behind a cache {cache}", (0, 1))
        return (cache.with_shape(cache.shape[0], "S", *cache.shape[2:]),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("torch.cat", ((Input(0), Input(1)), 1))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        return torch.cat(inputs, 1)


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
