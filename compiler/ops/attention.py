"""Scaled dot-product attention: over a whole sequence, over a key-value cache, or under a padding mask.

Specs lower to these ops. In training programs, the fusion pass replaces these ops with the ops of `saved_attention`.
"""

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

from specc.compiler.expr import reread, score_text, torch_text, torch_value, variables
from specc.compiler.expr.mask import CAUSAL, LANGUAGE, Mask, sees_itself
from specc.compiler.expr.python_lines import INSIDE, WIDTH, fitted
from specc.compiler.expr.score import PLAIN, Score
from specc.compiler.expr.values import Expr, Logic, Read
from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Dim, Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record


def scaled_product(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Returns scale * q k^T, [B, H, T, S]. By default, the scale is 1 / sqrt(C)."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    product = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    return product / q.shape[-1] ** 0.5 if scale is None else product * scale


class Attention(Op):
    """The base class of attention ops.

    Attention ops compute softmax(score) v for q [B, T, H, C], k [B, S, G, C] and v [B, S, G, D], where G divides H. The
    output is [B, T, H, D]. The score is q k^T / sqrt(C) unless a subclass defines another score.

    Each subclass has its own mask. A query that attends to no key has output 0, as in Torch.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v = inputs[:3]
        heads, kv_heads = q.shape[-2], k.shape[-2]
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        if heads % kv_heads or k.shape[:-1] != v.shape[:-1] or q.width != k.width:
            raise TypeRuleError(f"cannot attend with q {q}, k {k}, v {v}: the shapes do not match", (0, 1, 2))
        return (q.with_shape(*q.shape[:-1], v.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q, k = inputs[0], inputs[1]
        return 2 * (q.count(sizes) + outputs[0].count(sizes)) * k.with_shape(k.shape[1]).count(sizes)

    def allowed(self, *inputs: Tensor) -> Tensor:
        """Returns the mask bool[T, S], which is True where a query attends to a key. Additional leading dims broadcast
        to [B, H]."""
        raise TypeRuleError(f"{self.name} does not define `allowed`, the mask")

    def scores(self, *inputs: Tensor) -> Tensor:
        """Returns the scores [B, H, T, S] before the mask."""
        return scaled_product(inputs[0], inputs[1])

    def sink(self, *inputs: Tensor) -> Tensor | None:
        """Returns one number per head, the sink [H], or None without sinks. The softmax adds exp(sink) to the
        denominator."""
        return None

    def logits(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the masked scores, and a mask bool[..., T, 1] of the queries that attend to nothing.

        The scores of these queries are not masked. If there is a sink, the sink is the last column of the scores, and
        every query attends to the sink.
        """
        import torch

        allowed, sink = self.allowed(*inputs), self.sink(*inputs)
        blind = ~allowed.any(-1, keepdim=True) if sink is None else allowed.new_zeros(1, 1)
        scores = self.scores(*inputs).masked_fill(~(allowed | blind), float("-inf"))
        if sink is not None:
            column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), -1)
        return scores, blind

    def reference(self, *inputs: Tensor) -> Tensors:
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


@record
class AttendContext:
    """The context of templates/torch/ops/attend_scored.py.jinja and attend_scored_cached.py.jinja.

    Attributes:
        function: the name of the function.
        summary: the docstring of the file.
        doc: the first sentence of the function's docstring, as lines.
        signature: the first line of the function.
        visible: the first line of the mask function.
        mask: the body of the mask function.
        scored: the first line of the score function. Empty if the score is s, the scaled product of query and key.
        score: the body of the score function.
        eager: the lines that compute y from q, k and v [B, heads, tokens, C] and the positions i and j.
        tiles: the lines that find two kinds of blocks of scores: blocks with at least one unmasked query-key pair, and
            blocks with only unmasked pairs.
        rows: the first dim of the blocks that `tiles` finds, as an expression: the batch size, or 1 if the blocks are
            equal for all sequences.
        read: the name, shape and meaning of the tensor that `tiles` reads, for a docstring.
        seen_pair: the call of the mask function for one query and key, in FlexAttention.
        flex: the lines that compute y with FlexAttention.
        keys: the sentence that describes the keys of a cache.
        places: the lines that compute the positions i and j in a cache.
        package: the package of the model. The names of custom ops contain this name.
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

    @property
    def functional(self) -> bool:
        """Whether the code of the score or of the eager attention calls torch.nn.functional."""
        return any("F." in line for line in (*self.score, *self.eager))


@record
class ScoreFields(Op):
    """The settings of causal attention with a score and a mask that are expressions.

    Attributes:
        score: The canonical text of the score, as in expr/score.py.
        mask: The canonical text of the mask, as in expr/mask.py.
        scale: The factor of q k^T. None stands for 1 / sqrt(C).
        tables: The names of the learned tables that the score reads.
        sinks: Whether the denominator of the softmax has an additional term exp(sink) per head.
    """

    score: str = PLAIN
    mask: str = CAUSAL
    scale: float | None = None
    tables: tuple[str, ...] = ()
    sinks: bool = False

    @property
    def of_scores(self) -> tuple[str, str, float | None, tuple[str, ...], bool]:
        """The fields of this class in order. The constructors of all subclasses accept these fields as their first
        arguments."""
        return self.score, self.mask, self.scale, self.tables, self.sinks

    @property
    def documents(self) -> bool:
        """Whether the mask calls `document`, and therefore reads the first positions of documents."""
        return "document" in self.mask

    @property
    def causal(self) -> bool:
        """Whether this is plain causal attention, with the default score and mask and without a sink."""
        return (self.score, self.mask, self.scale, self.sinks) == (PLAIN, CAUSAL, None, False)

    @property
    def further(self) -> tuple[str, ...]:
        """The names of the additional inputs, in order.

        If the mask calls `document`, `start` is an input: the first position of each query's document, i64[B, T]. If
        there are sinks, `sinks` [H] is an input. The learned tables follow.
        """
        return (*(("start",) if self.documents else ()), *(("sinks",) if self.sinks else ()), *self.tables)

    @property
    def title(self) -> str:
        """The part of a kernel name for the score and the mask, such as `s_sub_slope_h_mul_d` or `d_lt_512`. d is i -
        j."""
        joined = isinstance(condition := reread(self.mask, LANGUAGE), Logic) and condition.op == "and"
        mask = (self.mask.removeprefix(f"{CAUSAL} and ") if joined else self.mask).replace(_SAME_DOCUMENT, "document")
        texts = [self.score if self.score != PLAIN else "", mask if self.mask != CAUSAL else ""]
        texts += [f"scale {self.scale:g}" if self.scale is not None else "", "sinks" if self.sinks else ""]
        words = (_SYMBOLS.get(word, word) for text in texts for word in _WORDS.findall(text.replace("i - j", "d")))
        title = "_".join(words).replace(".", "p")
        return title if len(title) <= LONGEST_TITLE else title[:LONGEST_TITLE].rpartition("_")[0]

    @property
    def description(self) -> str:
        scale = f"scale {self.scale:g}" if self.scale is not None else ""
        score = f"score {self.score}" if self.score != PLAIN else ""
        return ", ".join(filter(None, (score, f"where {self.mask}", scale, "a sink per head" if self.sinks else "")))

    def parsed(self, heads: Dim) -> tuple[Score, Mask]:
        assert isinstance(heads, int)
        return Score.of(self.score, self.tables, int(heads)), Mask.of(self.mask, int(heads))

    def check_further(self, q: TensorType, types: Sequence[TensorType], place: int) -> None:
        """Raises TypeRuleError if an additional input does not match q. Additional inputs begin at index `place`."""
        for i, (name, type) in enumerate(zip(self.further, types, strict=True), place):
            if name == "start" and type != TensorType(q.shape[:2], "i64"):
                raise TypeRuleError(f"needs a document start for each token of q {q}, not {type}", (0, i))
            if name == "sinks" and type.shape != q.shape[-2:-1]:
                raise TypeRuleError(f"needs one sink per head of q {q}, not {type}", (0, i))


@record
class ScoredBase(ScoreFields, Attention):
    """The base class of causal attention with a score and a mask. The additional inputs of `ScoreFields` follow the
    inputs of the subclass."""

    template: ClassVar[str] = "torch/ops/attend_scored_cached.py.jinja"
    context: ClassVar[type[AttendContext]] = AttendContext
    leading: ClassVar[tuple[str, ...]] = ("q", "k", "v")  # the names of the inputs that precede the additional inputs

    @property
    def arity(self) -> int:
        return len(self.leading) + len(self.further)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        self.check_further(inputs[0], inputs[len(self.leading) :], len(self.leading))
        return Attention.infer(self, inputs)

    def named(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.further, inputs[len(self.leading) :], strict=True))

    def positions(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the positions of the queries [T, 1] and of the keys [S]."""
        raise TypeRuleError(f"{self.name} does not define `positions`, the positions of queries and keys")

    def _values(self, *inputs: Tensor) -> dict[str, Tensor | float]:
        import torch

        i, j = self.positions(*inputs)
        h = torch.arange(inputs[0].shape[-2], device=i.device)[:, None, None]
        named = self.named(inputs)
        if self.documents:
            named["start"] = named["start"][:, None, :, None]
        return {"i": i, "j": j, "h": h, **named}

    def allowed(self, *inputs: Tensor) -> Tensor:
        _, mask = self.parsed(inputs[0].shape[-2])
        return torch_value(mask.condition, self._values(*inputs)).expand(*_common(mask, inputs[0], inputs[1]))

    def scores(self, *inputs: Tensor) -> Tensor:
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

    def sink(self, *inputs: Tensor) -> Tensor | None:
        return self.named(inputs)["sinks"] if self.sinks else None

    def attend_call(self, inputs: Sequence[TensorType]) -> TorchCall:
        score, mask = self.parsed(inputs[0].shape[-2])
        cached = "positions" in self.leading
        words = ("attend", "cached" if cached else "", "paged" if "table" in self.leading else "", self.title)
        function = "_".join(filter(None, words))
        parameters = [*self.leading, *self.further]
        tables = "".join(f", {name}" for name in self.tables)
        scored = not score.plain
        doc = "Attention of q [B, T, H, C] over k, v [B, T, G, C]"
        if cached:
            keys = "[P, page, G, C]" if "table" in self.leading else "[B, S, G, C]"
            doc = f"Attention of q [B, T, H, C] at `positions` over cached k, v {keys}"
        context = self.context(
            function=function,
            summary="\n".join(wrap(f'"""Attention, {self.description}."""', WIDTH, break_long_words=False)),
            doc=tuple(wrap(f'"""{doc}, {self.description}.', INSIDE, break_long_words=False)),
            signature=_signature(function, parameters),
            visible=_signature("visible", ("i", "j", "h", *self.visible_reads)),
            mask=_statement("return", self.visible_text(mask)),
            scored=_signature("scored", ("s", "i", "j", "h", *self.tables)) if scored else "",
            score=_statement("return", score_text(score.value, score.elements())),
            **self._places(scored, mask, tables),  # type: ignore[arg-type]
        )
        return TorchCall(function, tuple(map(Input, range(self.arity))), generated=(self.template, context))

    @property
    def visible_reads(self) -> tuple[str, ...]:
        """The values that the generated mask function reads besides i, j and h."""
        return ("start",) if self.documents else ()

    def visible_text(self, mask: Mask) -> str:
        """Returns the mask as a Torch expression of i, j, h and `visible_reads`."""
        return torch_text(mask.condition, whole=True)

    def _eager(self, scored: bool, tables: str) -> tuple[str, ...]:
        """Returns the lines that compute y from all scores, without FlexAttention. `scored` states whether there is a
        score function. `tables` are the arguments of the score function that hold tables, as text."""
        lines = ["h = torch.arange(q.shape[1], device=q.device)[:, None, None]"]
        reads = ("start[:, None, :, None]" if name == "start" else name for name in self.visible_reads)
        lines.append(f"seen = visible({', '.join(('i', 'j', 'h', *reads))})")
        # With a mask, Torch's kernels that do not store the scores need as many key heads as query heads.
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
        raise TypeRuleError(f"{self.name} does not define the template fields of its positions")


def _signature(function: str, parameters: Sequence[str]) -> str:
    items = [f"{name}: Tensor" for name in parameters]
    line = f"def {function}({', '.join(items)}) -> Tensor:"
    if len(line) <= WIDTH:
        return line
    return f"def {function}(\n    {', '.join(items)}\n) -> Tensor:"


def _statement(head: str, text: str) -> tuple[str, ...]:
    return fitted(f"{head} {text}", INSIDE)


def _tile_lines(name: str, condition: Expr) -> tuple[str, ...]:
    text = torch_text(condition, whole=True)
    return _statement(f"{name} =", text if variables(condition) else f"torch.full_like(i0 <= j0, {text})")


def _common(mask: Mask, q: Tensor, k: Tensor) -> tuple[int, ...]:
    names = variables(mask.condition)
    rows, heads = (len(q) if "start" in names else 1), (q.shape[-2] if "h" in names else 1)
    lead = (rows, heads) if "start" in names or "h" in names else ()
    return (*lead, q.shape[1], k.shape[1])


class Sdpa(ScoredBase):
    """Causal attention over a whole sequence. Inputs are q, k, v and the additional inputs."""

    name: ClassVar[str] = "sdpa"
    template: ClassVar[str] = "torch/ops/attend_scored.py.jinja"

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q = inputs[0]
        tokens = q.with_shape(q.shape[1]).count(sizes)
        channels = q.count(sizes) + outputs[0].count(sizes)
        return 2 * channels // tokens * self.parsed(q.shape[-2])[1].pairs(tokens)

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
        flex += ["mask = BlockMask(  # type: ignore[misc]"]  # mypy takes `tables` to be of any length
        flex += ["    (tokens, tokens), *tables, BLOCK_SIZE=(size, size), mask_mod=pair_seen", ")"]
        if self.sinks:
            flex += [f"y, lse = flex_attention(q, k, v, {', '.join(settings)}, return_lse=True)"]
            flex += ["y = y * torch.sigmoid(lse - sinks[:, None]).to(y.dtype).unsqueeze(-1)"]
        else:
            flex += [f"y = flex_attention(q, k, v, {', '.join(settings)})"]
        return {
            "eager": ("i, j = position[:, None], position", *self._eager(scored, tables)),
            "tiles": (*starts, *_tile_lines("some", mask.any), *_tile_lines("every", mask.all)),
            "rows": "len(x)" if self.documents else "1",
            "read": "x i64[B, T], the starts of documents" if self.documents else "x [B, T, ...]",
            "seen_pair": f"visible(i, j, h{', start[row, i]' if self.documents else ''})",
            "flex": tuple(flex),
        }

    def positions(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        row, column = (torch.arange(x.shape[1], device=x.device) for x in inputs[:2])
        return row.unsqueeze(1), column


class SdpaSeen(Attention):
    """Bidirectional attention of q [B, T, H, C] over k, v [B, S, G, C]. Queries attend only to the positions where
    `seen` bool[B, S] is True."""

    name: ClassVar[str] = "sdpa_seen"
    arity: ClassVar[int] = 4

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        k, seen = inputs[1], inputs[3]
        if seen != TensorType(k.shape[:2], "bool"):
            raise TypeRuleError(f"cannot mask keys {k} by {seen}: the shapes or dtypes do not match", (1, 3))
        return Attention.infer(self, inputs)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("attend_seen", tuple(map(Input, range(4))))

    def allowed(self, *inputs: Tensor) -> Tensor:
        return inputs[3][:, None, None]
