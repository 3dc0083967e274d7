"""The decoder: a causal language model, from token ids to a distribution over the next token through residual
blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.architectures.function_table import Functions
from specc.compiler.architectures.stack import Blocks, Stack, one_of
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape, SizeNames, Tokens
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.init import Init
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Embed, Norm, formula_problems
from specc.compiler.blocks.token import order_problems
from specc.compiler.expr import parse, variables
from specc.compiler.ir.graph import Builder, Graph, TensorType, TypeRuleError
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.ops.positions import Positions
from specc.compiler.ops.shape import Last
from specc.compiler.programs.programs import LoweringError, Phase, Programs, read_by
from specc.compiler.strict import Path, Problem, StrictModel, Unit, later

if TYPE_CHECKING:
    AnyEmbed = Embed
    AnyNorm = Norm
else:
    AnyEmbed, AnyNorm = map(one_of, (Embed, Norm))


WHOLE = ("train", "score")
HALVES = ("features", "nats")  # the halves of `score`, for adaptation to a text


class Loop(StrictModel):
    """Depth recurrence: some blocks run several times in sequence.

    Runs of a block share its parameters. Parameters that no program reads yet are not updated.

    Attributes:
        first: the first block of the loop, counted from 0.
        last: the last block of the loop.
        passes: how often the blocks run.
        after: the share of training, by steps or by the clock, until which each block runs once. With 0, blocks loop
            from the start; with 1, they never loop.
    """

    first: Annotated[int, Field(ge=0, lt=1000)]
    last: Annotated[int, Field(ge=0, lt=1000)]
    passes: Annotated[int, Field(ge=2, le=64)]
    after: Unit = later(0.0)


class DecoderBlocks(Blocks):
    """Blocks that run several times if `loop` selects them. Skips then connect runs instead of blocks.

    Attributes:
        loop: the blocks that run several times.
    """

    loop: Loop | None = later(None)

    @property
    def order(self) -> tuple[int, ...]:
        if self.loop is None or self.loop.after >= 1:
            return super().order
        again = tuple(range(self.loop.first, self.loop.last + 1))
        return (*range(self.loop.last + 1), *again * (self.loop.passes - 1), *range(self.loop.last + 1, self.count))

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        late = self.loop is not None and 0 < self.loop.after < 1
        return (self.order, super().order) if late else (self.order,)

    @property
    def loops(self) -> bool:
        return self.loop is not None

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        if self.loop is not None and not self.loop.first <= self.loop.last < self.count:
            message = f"a loop from block {self.loop.first} to {self.loop.last} of {self.count}"
            hint = f"blocks go from 0 to {self.count - 1}, the last not before the first"
            yield Problem(("loop",), "S243", message, hint)
        yield from super().problems_in(dim, layers)


class Decoder(Architecture):
    """A causal language model: embed, blocks, norm, head.

    Attributes:
        vocab: the number of token ids.
        dim: the features of the residual stream.
        context: the most tokens that the model is trained and used on at a time.
        init: the initialization of matrices.
        output_init: the initialization of matrices that write to the residual stream; `init` if unset.
        embed: the steps from token ids to the first block's input.
        blocks: the blocks.
        norm: the norm after the last block.
        head: the step to logits.
    """

    kind: Literal["decoder"]
    vocab: Annotated[int, Field(ge=2, le=2**24)]
    dim: Annotated[int, Field(gt=0, le=2**17)]
    context: Annotated[int, Field(gt=0, le=2**22)]
    init: Init = Init(normal=0.02)
    output_init: Init | None = None
    embed: Annotated[tuple[AnyEmbed, ...], Field(min_length=1, max_length=16)]
    blocks: DecoderBlocks
    norm: AnyNorm = Rms(kind="rms")
    head: LogitHead = LogitHead()

    @property
    def title(self) -> str:
        loop = self.blocks.loop
        runs = f" in {len(self.blocks.order)} runs" if loop and loop.after < 1 else ""
        runs += f" once {loop.after:.0%} of training are done" if loop and 0 < loop.after < 1 else ""
        blocks = f"{self.blocks.count} blocks of {self.dim}{runs}"
        return f"decoder, {blocks}, {self.context} tokens, vocabulary {self.vocab}"

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @property
    def window(self) -> int:
        return self.context

    def after(self, done: float) -> "Decoder":
        loop = self.blocks.loop
        if loop is None or loop.after <= done:
            return self
        blocks = self.blocks.model_copy(update={"loop": loop.model_copy(update={"after": 1.0})})
        return self.model_copy(update={"blocks": blocks})

    @property
    def late(self) -> tuple[tuple[Path, str, float], ...]:
        loop = self.blocks.loop
        return (
            () if loop is None or loop.after >= 1 else ((("model", "blocks", "loop", "after"), "the loop", loop.after),)
        )

    @property
    def marks(self) -> tuple[tuple[Path, int], ...]:
        marked: list[tuple[Path, int | None]] = [(("embed", i), step.mark) for i, step in enumerate(self.embed)]
        marked += [(("blocks", "layers", i), layer.mark) for i, layer in enumerate(self.blocks.layers)]
        return tuple((("model", *at, "bos"), mark) for at, mark in marked if mark is not None)

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of the model's parts."""
        yield from (problem.under("embed") for problem in order_problems(self.embed))
        yield from (problem.under("blocks") for problem in self.blocks.problems_in(self.dim))
        last = self.norm.scale
        if isinstance(last, str) and "layer" in variables(parse(last)):
            hint = "use `layers`, the number of blocks"
            yield Problem(("norm", "scale"), "S216", "the last norm is in no layer, but its scale reads `layer`", hint)
        else:
            yield from formula_problems(last, ("norm", "scale"), self.blocks.count)
        for (_, *at), mark in self.marks:
            if mark >= self.vocab:
                message = f"the id {mark} starts a document, and ids end at {self.vocab - 1}"
                yield Problem(tuple(at), "S249", message, "name the tokenizer's own mark, or leave it out")
        for i, layer in enumerate(self.blocks.layers):
            if layer.reads_source:
                message = f"{layer.title} reads an encoder, and a decoder alone has none"
                hint = "use `kind: encoder_decoder`, or let it read the sequence itself"
                yield Problem(("blocks", "layers", i), "S230", message, hint)

    def lower(self, name: str, dtype: str, halves: bool = False) -> Programs:
        return _Lowering(self, name, dtype).run(halves)


class _Lowering:
    """The lowering of one decoder."""

    def __init__(self, model: Decoder, name: str, dtype: str) -> None:
        self.model, self.name = model, name
        count = model.blocks.count
        out = model.output_init or model.init
        names = SizeNames()
        vocab, dim = names.size("V", model.vocab, "tokens", "V"), names.size("D", model.dim, "features", "D")
        self.shape = Shape(dim, count, model.context, vocab, dtype, model.init, out, names=names)
        self.functions = Functions(count)
        embed_titles = [(f"embed.{step.title}", i) for i, step in enumerate(model.embed)]
        self.places: dict[str, Path] = {title: ("model", "embed", i) for title, i in embed_titles}
        self.places |= {"head": ("model", "head"), "norm": ("model", "norm"), "skips": ("model", "blocks", "skips")}
        for layer in range(count):
            for i, part in enumerate(model.blocks.layers):
                self.places[f"blocks.{layer}.{part.title}"] = ("model", "blocks", "layers", i)

    def run(self, halves: bool) -> Programs:
        programs: tuple[Graph, ...] = (
            self.scored("train", "mean"),
            self.scored("score", "none"),
            self.cached("prefill", "T"),
            self.cached("decode", 1),
            *(self.halves() if halves else ()),
        )
        phases: tuple[Phase, ...] = ()
        loop = self.model.blocks.loop
        for once in self.model.blocks.orders[1:]:
            assert loop is not None
            phases = (Phase(loop.after, "train_once", "score_once"),)
            programs += self.scored("train_once", "mean", once), self.scored("score_once", "none", once)
        if refused := self.functions.refused:
            hint = "change the number or formula"
            raise LoweringError(tuple(Problem(self.place_of(init), "S221", refused[init], hint) for init in refused))
        places = tuple(self.places.items())
        params, functions = tuple(self.functions.params.values()), tuple(self.functions.graphs.values())
        before = tuple(name for phase in phases for name in (phase.train, phase.score))
        whole = (*WHOLE, *(HALVES if halves else ()), *before)
        constants = tuple((name, *constant) for name, constant in self.functions.constants.items())
        context = self.model.context
        made = Programs(self.name, params, functions, programs, places, whole, context=context, constants=constants)
        sizes = tuple((name, *size) for name, size in self.shape.names.values.items())
        made = replace(made, sizes=sizes, layers=self.functions.layers)
        return replace(made, phases=tuple(replace(phase, rests=_unread(made, phase)) for phase in phases))

    def scored(self, name: str, reduction: Literal["mean", "none"], order: tuple[int, ...] | None = None) -> Graph:
        """Returns the program ids, targets i64[B, T] -> cross-entropy in nats, f32: the mean, or one value per token.

        Args:
            name: the name of the program.
            reduction: `mean` for training, with dropout; `none` for one value per token.
            order: the order in which blocks run; None for the model's own.
        """
        b = Builder(name)
        ids = b.input("ids", TensorType(("B", "T"), "i64"))
        targets = b.input("targets", TensorType(("B", "T"), "i64"))
        x, _ = self.trunk(b, ids, "", reduction == "mean", order)
        logits = self.head(b, x)
        loss = b.add("loss", CrossEntropy(reduction), (logits, targets))
        return self.functions.program(b, {"loss": loss})

    def halves(self) -> tuple[Graph, Graph]:
        """Returns `score` in two programs.

        `features`: ids i64[B, T] -> the input of the head, x [B, T, D]. `nats`: x and targets i64[B, T] ->
        cross-entropy in nats, f32, one value per token. The loss in `nats` is outside the scope of the head, so it is
        not fused: a fused loss of one value per token has no gradient.
        """
        b = Builder("features")
        x, _ = self.trunk(b, b.input("ids", TensorType(("B", "T"), "i64")), "", False)
        first, made = self.functions.program(b, {"x": x}), b.types[x]
        b = Builder("nats")
        x, targets = b.input("x", made), b.input("targets", TensorType(("B", "T"), "i64"))
        if self.model.head.tied:
            table = self.functions.params["embed.token"]
            b.param(table.name, TensorType(table.shape, table.dtype), table.init)
        logits = self.head(b, x)
        b.scope = ""
        nats = b.add("nats", CrossEntropy("none"), (logits, targets))
        return first, self.functions.program(b, {"nats": nats})

    def cached(self, name: str, tokens: int | str) -> Graph:
        """Returns the program ids i64[B, T] that follow `start` (i64[]) tokens in the caches -> logits f32[B, V] of the
        last token, and the caches."""
        b = Builder(name)
        ids = b.input("ids", TensorType(("B", tokens), "i64"))
        start = b.input("start", TensorType((), "i64"))
        x, state = self.trunk(b, ids, start, False)
        logits = self.head(b, b.add("last", Last(), (x,)))
        return self.functions.program(b, {"logits": logits, **state})

    def trunk(
        self, b: Builder, ids: str, start: str, training: bool, order: tuple[int, ...] | None = None
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the embedding, blocks and last norm. With `start`, declares the caches as inputs.

        Args:
            b: the builder of the program.
            ids: the token ids, i64[B, T].
            start: the number of tokens in the caches, i64[]; empty for a whole sequence.
            training: whether dropout applies.
            order: the order in which blocks run; None for the model's own.

        Returns:
            The features, [B, T, D], and the new caches by name.
        """
        x, own = self.embedded(b, ids, start)
        wanted = self.model.blocks.shared(self.shape)
        positions = ""
        if start or any(one.positional for one in wanted):
            positions = b.add("positions", Positions(), (ids, start) if start else (ids,))
        shared: dict[str, str] = {}
        for one in wanted:
            keeps = {f"cache.shared.{one.name}.{key}": type for key, type in one.state().items()} if start else {}
            cache = {key.rpartition(".")[2]: b.input(key, type) for key, type in keeps.items()}
            made = one.lower(b, Tokens(ids, start, positions, cache))
            shared |= zip(one.refs, made, strict=False)
            own |= zip(keeps, made[len(one.refs) :], strict=True)
        caches = self.model.blocks.state(self.shape) if start else {}
        kept = {key: b.input(f"cache.{key}", type) for key, type in caches.items()}
        place: Path = ("model", "blocks")
        site = CallSite("blocks", "block", place, self.places, self.functions)
        stack = Stack(self.model.blocks, self.shape, site, order)
        context = LoweringContext(positions, shared, kept, training=training, extends=bool(start))
        x, state = stack.run(b, x, context)
        state = own | {f"cache.{key}": ref for key, ref in state.items()}
        return self.model.norm.lower(b, x, "norm", self.shape), state

    def embedded(self, b: Builder, ids: str, start: str) -> tuple[str, dict[str, str]]:
        """Adds the embedding steps. Returns the first block's input, and the new state of the steps by name."""
        x: str | None = None
        state: dict[str, str] = {}
        b.scope = "embed"
        for i, step in enumerate(self.model.embed):
            kept = step.state(b.types[x].width if x is not None else self.shape.dim, self.shape) if start else {}
            cache = {key: b.input(f"cache.embed.{step.title}.{key}", type) for key, type in kept.items()}
            try:
                lowered = step.lower(b, x, Tokens(ids, start, cache=cache), self.shape)
            except TypeRuleError as error:
                hint = "make the widths equal: a step reads what the one before it gives"
                raise LoweringError((Problem(("model", "embed", i), "S301", error.message, hint),)) from None
            state |= {f"cache.embed.{step.title}.{key}": ref for key, ref in lowered.state.items()}
            x = lowered.value
        b.scope = ""
        assert x is not None
        return x, state

    def head(self, b: Builder, x: str) -> str:
        b.scope = "head"
        try:
            return self.model.head.lower(b, x, self.shape, "@embed.token")
        except TypeRuleError as error:
            related = (("the token table", ("model", "embed", 0)),)
            hint = f"make the widths equal; the model's dim is {self.model.dim}"
            raise LoweringError((Problem(("model", "head"), "S301", error.message, hint, related),)) from None

    def place_of(self, init: Init) -> Path:
        """Returns the spec path of an initialization."""
        return ("model", *next((path for found, path in _inits(self.model) if found is init), ()))


def _unread(programs: Programs, phase: Phase) -> tuple[str, ...]:
    read = read_by(programs, phase.train)
    return tuple(param.name for param in programs.params if param.name not in read)


def _inits(value: object, path: Path = ()) -> Iterator[tuple[Init, Path]]:
    """Yields every initialization in a spec, with its path."""
    if isinstance(value, Init):
        yield value, path
    elif isinstance(value, StrictModel):
        for name in type(value).model_fields:
            yield from _inits(getattr(value, name), (*path, name))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _inits(item, (*path, i))
