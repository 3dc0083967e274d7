"""The decoder: a causal language model, from token ids to a distribution over the next token through residual
blocks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.architectures.blocks import Between, Blocks, one_of
from specc.compiler.architectures.function_table import Functions
from specc.compiler.architectures.stack import Stack
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape, SizeNames, Tokens
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.init import Init
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Embed, Norm
from specc.compiler.blocks.token import order_problems
from specc.compiler.blocks.wiring import number_problem
from specc.compiler.expr import parse, variables
from specc.compiler.ir.graph import Builder, Graph, TensorType, TypeRuleError
from specc.compiler.losses.term import LossTerm, add_loss, declare_weights
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.ops.positions import Positions
from specc.compiler.ops.shape import Last
from specc.compiler.programs.programs import LoweringError, Phase, Programs, read_by
from specc.compiler.schedule import SegmentSchedule, change_shares, points_of
from specc.compiler.strict import Path, Problem, StrictModel, Unit, later

if TYPE_CHECKING:
    AnyEmbed = Embed
    AnyNorm = Norm
else:
    AnyEmbed, AnyNorm = map(one_of, (Embed, Norm))


def indices(text: str) -> tuple[int, ...]:
    """Returns the indices that an order lists, such as `0..2 1..2 3`.

    Raises:
        ValueError: if the text is not such a list, or lists more than 4,000 indices.
    """
    indices: list[int] = []
    for word in text.split(" "):
        match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", word, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"`{word}` is neither an index nor a range such as 3..5")
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(indices) > 4000:
            raise ValueError("an order has at most 4,000 runs")
    return tuple(indices)


def _ordered(text: str) -> str:
    indices(text)
    return text


Order = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_ordered)]
WHOLE = ("train", "score")
NOTHING: Mapping[str, str] = {}
HALVES = ("features", "nats")  # the halves of `score`, for adaptation to a text


class OrderSchedule(SegmentSchedule):
    """Orders of blocks. Parameters that no program reads yet are not updated."""

    at: Annotated[tuple[tuple[Unit, Order], ...], Field(min_length=1, max_length=16)]


class DecoderBlocks(Blocks):
    """Blocks that may run in another `order`, and more than once: `0..5 3..5 6..10` runs blocks 3 to 5 twice. Runs of a
    block share its parameters.

    Attributes:
        order: the blocks in the order in which they run, or a schedule of orders. If unset, each block runs once.
        between: modules between runs.
    """

    order: Order | OrderSchedule | None = later(None)
    between: Annotated[tuple[Between, ...], Field(max_length=16)] = later(())

    @property
    def orders(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        if self.order is None:
            return super().orders
        return tuple((share, indices(text)) for share, text in points_of(self.order))

    @property
    def modules(self) -> tuple[Between, ...]:
        return self.between

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        stated = {i for _, order in self.orders for i in order}
        if stated != set(range(self.count)):
            wrong = min(stated ^ set(range(self.count)))
            message = f"block {wrong} {'is not one' if wrong in stated else 'never runs'} of {self.count}"
            yield Problem(("order",), "S243", message, f"blocks go from 0 to {self.count - 1}; each runs in some order")
            return
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
        share, order = self.blocks.orders[-1]
        runs = f" in {len(order)} runs" if len(order) != self.blocks.count else ""
        runs += f" once {share:.0%} of training are done" if runs and share else ""
        blocks = f"{self.blocks.count} blocks of {self.dim}{runs}"
        return f"decoder, {blocks}, {self.context} tokens, vocabulary {self.vocab}"

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @property
    def window(self) -> int:
        return self.context

    @property
    def marks(self) -> tuple[tuple[Path, int], ...]:
        marked: list[tuple[Path, int | None]] = [(("embed", i), step.mark) for i, step in enumerate(self.embed)]
        blocks = self.blocks
        marked += [
            (("blocks", *blocks.source_of(("layers", j, "bos"), i)[:-1]), layer.mark)
            for i, j, layer in blocks.all_layers
        ]
        return tuple(dict.fromkeys((("model", *at, "bos"), mark) for at, mark in marked if mark is not None))

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of the model's parts."""
        yield from (problem.under("embed") for problem in order_problems(self.embed))
        for i, step in enumerate(self.embed):
            yield from (problem.under("embed", i) for problem in step.problems_in(self.dim))
        yield from (problem.under("blocks") for problem in self.blocks.problems_in(self.dim))
        last = self.norm.scale
        if isinstance(last, str) and "layer" in variables(parse(last)):
            hint = "use `layers`, the number of blocks"
            yield Problem(
                ("norm", "scale"),
                "S216",
                "the scale of the last norm reads `layer`, but this norm is outside the layers",
                hint,
            )
        else:
            yield from number_problem(last, ("norm", "scale"), 0, self.blocks.count)
        for name in ("places", "shared"):
            if getattr(self.norm, name) != type(self.norm).model_fields[name].default:
                message = f"`{name}` is a field of the norm of blocks, not of the norm after the last one"
                yield Problem(("norm", name), "S285", message, f"remove `{name}`")
        for (_, *at), mark in self.marks:
            if mark >= self.vocab:
                message = f"bos is {mark}, but the largest id is {self.vocab - 1}"
                yield Problem(
                    tuple(at), "S249", message, "use the id that the tokenizer puts before a document, or remove bos"
                )
        problems: dict[tuple[Path, str], Problem] = {}
        for i, j, layer in self.blocks.all_layers:
            for problem in layer.problems_of_context(self.context, True):
                path = ("blocks", *self.blocks.source_of(("layers", j, *problem.path), i))
                moved = Problem(path, problem.code, problem.message, problem.hint)
                problems.setdefault((path, problem.code), moved)
        yield from problems.values()
        reading = {
            self.blocks.source_of(("layers", j), i): layer
            for i, j, layer in self.blocks.all_layers
            if layer.reads_source
        }
        for place, layer in reading.items():
            message = f"{layer.title} reads an encoder, but a model of kind decoder has none"
            hint = "use `kind: encoder_decoder`, or `of: self`"
            yield Problem(("blocks", *place), "S230", message, hint)

    @property
    def bounded(self) -> str:
        steps = (step.title for step in self.embed if step.bounded)
        return next(iter((*steps, *(layer.title for _, _, layer in self.blocks.all_layers if layer.bounded), "")))

    @property
    def losses(self) -> frozenset[str]:
        return frozenset(f"{layer.title}.{loss}" for _, _, layer in self.blocks.all_layers for loss in layer.losses)

    def lower(self, name: str, dtype: str, halves: bool = False, losses: Sequence[LossTerm] = ()) -> Programs:
        return _Lowering(self, name, dtype, losses).run(halves)


class _Lowering:
    """The lowering of one decoder, without schedules."""

    def __init__(self, model: Decoder, name: str, dtype: str, losses: Sequence[LossTerm]) -> None:
        self.whole, self.name, self.losses = model, name, losses
        self.model, self.phase, self.title = model.after(1.0), "", ""
        model = self.model
        count = model.blocks.count
        out = model.output_init or model.init
        names = SizeNames()
        vocab, dim = names.size("V", model.vocab, "tokens", "V"), names.size("D", model.dim, "features", "D")
        self.shape = Shape(dim, count, model.context, vocab, dtype, model.init, out, names=names)
        self.functions = Functions(count)
        embed_titles = [(f"embed.{step.title}", i) for i, step in enumerate(model.embed)]
        self.places: dict[str, Path] = {title: ("model", "embed", i) for title, i in embed_titles}
        self.places |= {"head": ("model", "head"), "norm": ("model", "norm")}
        for i, module in enumerate(model.blocks.between):
            self.places[module.name] = ("model", "blocks", "between", i)
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
        model, plain = self.model, tuple(range(self.model.blocks.count))
        titles, methods = {model.head: ""}, {model.blocks.every: ""}  # the names of parts that differ from the last
        for i, (share, until) in enumerate(pairwise((0.0, *change_shares(self.whole)))):
            self.model = self.whole.after(share)
            self.title = titles.setdefault(self.model.head, f"softcap_phase{i}")
            self.phase = methods.setdefault(self.model.blocks.every, f"phase{i}")
            once = self.model.blocks.runs == plain != model.blocks.runs and all(p.train != "train_once" for p in phases)
            names = ("train_once", "score_once") if once else (f"train_phase{i}", f"score_phase{i}")
            phases += (Phase(until, *names),)
            programs += self.scored(names[0], "mean"), self.scored(names[1], "none")
        self.model, self.phase, self.title = model, "", ""
        if refused := self.functions.refused:
            hint = "change the number or formula"
            raise LoweringError(tuple(Problem(self.place_of(init), "S221", refused[init], hint) for init in refused))
        places = tuple(self.places.items())
        params, functions = tuple(self.functions.params.values()), tuple(self.functions.graphs.values())
        before = tuple(name for phase in phases for name in (phase.train, phase.score))
        whole = (*WHOLE, *(HALVES if halves else ()), *before)
        constants = tuple((name, *constant) for name, constant in self.functions.constants.items())
        context = self.model.context
        lowered = Programs(self.name, params, functions, programs, places, whole, context=context, constants=constants)
        sizes = tuple((name, *size) for name, size in self.shape.names.values.items())
        lowered = replace(lowered, sizes=sizes, layers=self.functions.layers)
        return replace(lowered, phases=tuple(replace(phase, rests=_unread(lowered, phase)) for phase in phases))

    def scored(self, name: str, reduction: Literal["mean", "none"]) -> Graph:
        """Returns the program ids, targets i64[B, T] -> cross-entropy in nats, f32: the mean, or one value per token.

        Args:
            name: the name of the program.
            reduction: `mean` for training, with dropout and all terms of the loss, whose weights are further inputs,
                f32[]; `none` for one value per token.
        """
        b = Builder(name)
        ids = b.input("ids", TensorType(("B", "T"), "i64"))
        targets = b.input("targets", TensorType(("B", "T"), "i64"))
        learns = reduction == "mean"
        weights = declare_weights(b, self.losses) if learns else {}
        x, _ = self.trunk(b, ids, "", learns, weights)
        logits = self.head(b, x)
        loss = add_loss(b, self.losses, logits, targets, learns)
        return self.functions.program(b, {"loss": loss})

    def halves(self) -> tuple[Graph, Graph]:
        """Returns `score` in two programs.

        `features`: ids i64[B, T] -> the input of the head, x [B, T, D]. `nats`: x and targets i64[B, T] ->
        cross-entropy in nats, f32, one value per token. The loss in `nats` is outside the scope of the head, so it is
        not fused: a fused loss of one value per token has no gradient.
        """
        b = Builder("features")
        x, _ = self.trunk(b, b.input("ids", TensorType(("B", "T"), "i64")), "", False)
        first, features = self.functions.program(b, {"x": x}), b.types[x]
        b = Builder("nats")
        x, targets = b.input("x", features), b.input("targets", TensorType(("B", "T"), "i64"))
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
        self, b: Builder, ids: str, start: str, training: bool, weights: Mapping[str, str] = NOTHING
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the embedding, blocks and last norm. With `start`, declares the caches as inputs.

        Args:
            b: the builder of the program.
            ids: the token ids, i64[B, T].
            start: the number of tokens in the caches, i64[]; empty for a whole sequence.
            training: whether dropout applies.
            weights: the weights of the losses that layers state, f32[], by LAYER.LOSS.

        Returns:
            The features, [B, T, D], and the new caches by name.
        """
        early = any(step.reads_positions for step in self.model.embed)
        positions = self.positions(b, ids, start) if early else ""
        x, new_state = self.embedded(b, Tokens(ids, start, positions))
        wanted = self.model.blocks.shared(self.shape)
        if not positions and (start or any(value.positional for value in wanted)):
            positions = self.positions(b, ids, start)
        shared: dict[str, str] = {}
        for value in wanted:
            keeps = {f"cache.shared.{value.name}.{key}": type for key, type in value.state().items()} if start else {}
            cache = {key.rpartition(".")[2]: b.input(key, type) for key, type in keeps.items()}
            refs = value.lower(b, Tokens(ids, start, positions, cache, x))
            shared |= zip(value.refs, refs, strict=False)
            new_state |= zip(keeps, refs[len(value.refs) :], strict=True)
        caches = self.model.blocks.state(self.shape) if start else {}
        cached = {key: b.input(f"cache.{key}", type) for key, type in caches.items()}
        place: Path = ("model", "blocks")
        site = CallSite("blocks", "block", place, self.places, self.functions)
        stack = Stack(self.model.blocks, self.shape, site, self.phase)
        context = LoweringContext(
            positions, shared, cached, ids, training=training, extends=bool(start), weights=weights
        )
        x, state = stack.run(b, x, context)
        state = new_state | {f"cache.{key}": ref for key, ref in state.items()}
        return self.model.norm.lower(b, x, "norm", self.shape), state

    def positions(self, b: Builder, ids: str, start: str) -> str:
        return b.add("positions", Positions(), (ids, start) if start else (ids,))

    def embedded(self, b: Builder, tokens: Tokens) -> tuple[str, dict[str, str]]:
        """Adds the embedding steps. Returns the first block's input, and the new state of the steps by name."""
        x: str | None = None
        state: dict[str, str] = {}
        b.scope = "embed"
        for i, step in enumerate(self.model.embed):
            kept = step.state(b.types[x].width if x is not None else self.shape.dim, self.shape) if tokens.start else {}
            cache = {key: b.input(f"cache.embed.{step.title}.{key}", type) for key, type in kept.items()}
            try:
                lowered = step.lower(b, x, replace(tokens, cache=cache), self.shape)
            except TypeRuleError as error:
                hint = "make the widths equal; a step reads the output of the step before it"
                raise LoweringError((Problem(("model", "embed", i), "S301", error.message, hint),)) from None
            state |= {f"cache.embed.{step.title}.{key}": ref for key, ref in lowered.state.items()}
            x = lowered.value
        b.scope = ""
        assert x is not None
        return x, state

    def head(self, b: Builder, x: str) -> str:
        b.scope = "head"
        try:
            return self.model.head.lower(b, x, self.shape, "@embed.token", self.title)
        except TypeRuleError as error:
            related = (("the token table", ("model", "embed", 0)),)
            hint = f"make the widths equal; the model's dim is {self.model.dim}"
            raise LoweringError((Problem(("model", "head"), "S301", error.message, hint, related),)) from None

    def place_of(self, init: Init) -> Path:
        """Returns the spec path of an initialization."""
        return ("model", *next((path for other, path in _inits(self.model) if other is init), ()))


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
