"""The decoder: a causal language model of residual blocks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.ahead import Modules, module_problems
from specc.compiler.architectures.architecture import Architecture
from specc.compiler.architectures.block import AnyNorm
from specc.compiler.architectures.blocks import Between, Blocks
from specc.compiler.architectures.shared_values import SharedValues
from specc.compiler.architectures.stack import Stack
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Embed
from specc.compiler.blocks.token import order_problems
from specc.compiler.blocks.wiring import number_problem
from specc.compiler.catalog import Kinds
from specc.compiler.changing_values import SegmentSchedule, change_shares, points_of
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, retyped
from specc.compiler.ir.types import TensorType
from specc.compiler.losses.module_ahead import ModuleAhead
from specc.compiler.losses.term import LossTerm, add_loss, declare_weights
from specc.compiler.ops.caches.paged_attention import STARTS, TABLE, LastOfTexts, PackedPositions, PackTexts
from specc.compiler.ops.loss import IGNORED, CrossEntropy, IgnoreFirst
from specc.compiler.ops.shape import Last
from specc.compiler.programs.init import Init
from specc.compiler.programs.programs import LoweringError, Phase, Programs, read_by, refused_at
from specc.compiler.programs.tables import Tables
from specc.compiler.records import record
from specc.compiler.strict import NonNegative, Path, Problem, StrictModel, Unit, accepted_by, later

if TYPE_CHECKING:
    AnyEmbed = Embed
else:
    AnyEmbed = Kinds(blocks, Embed)


def indices(text: str) -> tuple[int, ...]:
    """Converts the text of an order to indices: `0..2 1..2 3` becomes 0, 1, 2, 1, 2, 3.

    Raises:
        ValueError: If the text is not a list of indices, or lists more than 4,000 indices.
    """
    indices: list[int] = []
    for word in text.split(" "):
        match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", word, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"`{word}` is neither the index of a block nor a range such as 3..5")
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(indices) > 4000:
            raise ValueError("an order has at most 4,000 runs")
    return tuple(indices)


Order = Annotated[str, Field(min_length=1, max_length=2000), accepted_by(indices)]
WHOLE = ("train", "score")
TOKENS = TensorType(("B", "T"), "i64")
HALVES = ("features", "nats")  # the two programs into which `score` is split, for adaptation to a text


class OrderSchedule(SegmentSchedule):
    """A schedule of block orders. The parameters of a block are not updated until an order contains the block."""

    at: Annotated[tuple[tuple[Unit, Order], ...], Field(min_length=1, max_length=16)]


class DecoderBlocks(Blocks):
    """Blocks that run in any `order`. A block may run several times: `0..5 3..5 6..10` runs blocks 3 to 5 twice. All
    runs of a block share the same parameters.

    Attributes:
        order: the blocks in the order in which they run, or a schedule of orders. By default, each block runs once.
        between: modules between runs of blocks.
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

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        stated = {i for _, order in self.orders for i in order}
        if stated != set(range(self.count)):
            wrong = min(stated ^ set(range(self.count)))
            verb = "lists" if wrong in stated else "omits"
            message = f"`order` {verb} block {wrong}, but the blocks of the model are 0 to {self.count - 1}"
            yield Problem(("order",), "S243", message, f"list each block from 0 to {self.count - 1} at least once")
            return
        yield from super().problems_in(shape)


class CacheSpec(StrictModel):
    """The cache of keys, values and latents for generation.

    Attributes:
        page: the number of positions per page. A table lists the pages of each text. Texts of a batch can have
            different lengths, and can join and leave at any time. If null, the cache has one row per text, and all
            texts of a batch have the same length.
        dtype: the dtype of cached values, by default the dtype of activations. `e4m3`: 8-bit floats, with one f32 scale
            per token and head.
    """

    page: Annotated[int, Field(ge=1, le=4096)] | None = 64
    dtype: Literal["e4m3"] | None = later(None)


class Decoder(Architecture):
    """A causal language model: embed, blocks, norm, head.

    Attributes:
        vocab: the number of token ids.
        dim: the number of features of the residual stream.
        prefix: the number of tokens at the start of a sequence that may attend to each other. The mask must admit these
            pairs of tokens, as `j <= i or j < prefix` does. The loss and the score begin after the prefix.
        context: the maximum number of tokens of an input, in training and in use.
        init: the initialization of matrices.
        output_init: the initialization of matrices that write to the residual stream. By default, `init`.
        embed: the steps that compute the input of the first block from token ids.
        blocks: the blocks.
        norm: the norm after the last block. null for no norm.
        head: the computation of logits.
        cache: the cache for generation. By default, the cache has one row per text, in the dtype of activations, and
            all texts of a batch have the same length.
    """

    kind: Literal["decoder"]
    vocab: Annotated[int, Field(ge=2, le=2**24)]
    dim: Annotated[int, Field(gt=0, le=2**17)]
    context: Annotated[int, Field(gt=0, le=2**22)]
    prefix: NonNegative = later(0)
    init: Init = Init(normal=0.02)
    output_init: Init | None = None
    embed: Annotated[tuple[AnyEmbed, ...], Field(min_length=1, max_length=16)]
    blocks: DecoderBlocks
    norm: AnyNorm | None = Rms(kind="rms")
    head: LogitHead = LogitHead.model_construct()
    cache: CacheSpec | None = later(None)

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

    def shape(self, tables: Tables) -> Shape:
        vocab, dim = tables.size("V", self.vocab, "tokens"), tables.size("D", self.dim, "features")
        inits = (self.init, self.output_init or self.init)
        coded = self.cache is not None and self.cache.dtype is not None
        return Shape(dim, tables, self.context, vocab, *inits, prefix=self.prefix, coded=coded)

    def problems(self) -> Iterator[Problem]:
        shape = self.shape(Tables(self.blocks.count))
        yield from (problem.under("embed") for problem in order_problems(self.embed))
        for i, step in enumerate(self.embed):
            yield from (problem.under("embed", i) for problem in step.problems_in(shape))
        if self.norm is not None:
            yield from number_problem(self.norm.scale, ("norm", "scale"), None, self.blocks.count)
        for name in ("places", "shared"):
            if self.norm is not None and getattr(self.norm, name) != type(self.norm).model_fields[name].default:
                message = f"`{name}` applies to the norm of blocks, not to the norm after the last block"
                yield Problem(("norm", name), "S285", message, f"remove `{name}`")
        problems = tuple(self.blocks.problems_in(shape))
        yield from (problem.under("blocks") for problem in problems)
        if 2 * self.prefix > self.context:
            message = f"a prefix of {self.prefix} tokens is more than half of the context of {self.context}"
            yield Problem(("prefix",), "S279", message, f"use at most {self.context // 2}")
        layers = (layer for _, _, layer in self.blocks.all_layers)
        if self.prefix and not problems and not any(layer.sees_later(shape) for layer in layers):
            message = f"`prefix` is {self.prefix}, but no `mask` lets a token attend to a later token"
            yield Problem(("prefix",), "S279", message, "set `mask: j <= i or j < prefix`, or remove `prefix`")

    @property
    def unscored(self) -> int:
        return max(0, self.prefix - 1)

    @property
    def bounded(self) -> str:
        parts = (*self.embed, *(layer for _, _, layer in self.blocks.all_layers))
        return next((part.title for part in parts if "bounded" in part.traits), "")

    @property
    def losses(self) -> frozenset[str]:
        return frozenset(f"{layer.title}.{loss}" for _, _, layer in self.blocks.all_layers for loss in layer.losses)

    def refuses_modules(self) -> Iterator[str]:
        table = next((getattr(step, "dim", None) for step in self.embed if step.title == "token"), None)
        yield from module_problems(self.blocks.every[-1], self.blocks.common, self.head, table in (None, self.dim))

    def lower(self, name: str, halves: bool = False, losses: Sequence[LossTerm] = ()) -> Programs:
        model = self.after(1.0)
        tables = Tables(model.blocks.count, dict(_places(model)))
        lowering = _Lowering(model, model.shape(tables), losses)
        programs = [lowering.scored("train", True), lowering.scored("score", False)]
        lowering.require_codes()
        page = 0 if model.cache is None else model.cache.page
        programs += [lowering.step(page)] if page else lowering.prefill_and_decode()
        programs += lowering.halves() if halves else ()
        phases: list[Phase] = []
        plain, runs = tuple(range(model.blocks.count)), model.blocks.runs
        # A phase with another head or other blocks than the last phase gets separate names
        titles, methods = {model.head: ""}, {model.blocks.every: ""}
        for i, (share, until) in enumerate(pairwise((0.0, *change_shares(self)))):
            then = self.after(share)
            title = titles.setdefault(then.head, f"softcap_phase{i}")
            phase = methods.setdefault(then.blocks.every, f"phase{i}")
            once = then.blocks.runs == plain != runs and all(other.train != "train_once" for other in phases)
            names = ("train_once", "score_once") if once else (f"train_phase{i}", f"score_phase{i}")
            before = replace(lowering, model=then, title=title, phase=phase)
            programs += before.scored(names[0], True), before.scored(names[1], False)
            phases.append(Phase(until, *names))
        whole = (*WHOLE, *(HALVES if halves else ()), *chain(*((phase.train, phase.score) for phase in phases)))
        lowered = tables.programs(name, tuple(programs), whole, model.context, model.place_of)
        return replace(lowered, phases=tuple(replace(phase, rests=_unread(lowered, phase)) for phase in phases))


def _places(model: Decoder) -> Iterator[tuple[str, Path]]:
    yield from ((f"embed.{step.title}", ("model", "embed", i)) for i, step in enumerate(model.embed))
    yield from ((name, ("model", name)) for name in ("head", "norm"))
    yield from ((module.name, ("model", "blocks", "between", i)) for i, module in enumerate(model.blocks.between))
    yield from ((f"blocks.{name}", ("model", "blocks", *path)) for name, path in model.blocks.places)


class _Trunk(NamedTuple):
    """The part of a program before the head.

    Attributes:
        features: the input of the head, [B, T, D].
        stream: the residual stream after the last block, [B, T, D].
        state: the new caches, by name.
        stack: the blocks.
        context: the values that the blocks can read.
    """

    features: str
    stream: str
    state: Mapping[str, str]
    stack: Stack
    context: LoweringContext


@record
class _Lowering:
    """Lowers a decoder for one phase of training. No schedule of the model changes within a phase, so that each
    schedule is replaced by its value.

    Attributes:
        model: The decoder.
        shape: The sizes of the model.
        losses: The terms of the training loss.
        title: The name of this phase's softcap in generated code. Empty if the last phase of training has the same
            softcap.
        phase: The method of the blocks that computes this phase, such as `phase0`. Empty if the method for the last
            phase of training computes the same.
    """

    model: Decoder
    shape: Shape
    losses: Sequence[LossTerm]
    title: str = ""
    phase: str = ""

    def scored(self, name: str, learns: bool) -> Graph:
        """Returns the program that maps `ids` and `targets`, i64[B, T], to the cross-entropy in nats, f32.

        Args:
            name: The name of the program.
            learns: Whether the program is for training. If so, dropout applies, and the result is the sum of all loss
                terms. The weights of terms are then additional inputs, f32[]. If not, the result is one value per
                token.
        """
        b = Builder(name)
        ids, targets = b.input("ids", TOKENS), b.input("targets", TOKENS)
        weights = declare_weights(b, self.losses) if learns else {}
        trunk = self.trunk(b, LoweringContext(ids, training=learns, weights=weights))
        logits, scored, ignore = self.head(b, trunk.features), targets, None
        if unscored := self.model.unscored:
            scored, ignore = b.add("scored", IgnoreFirst(unscored, IGNORED), (targets,)), IGNORED
        loss = add_loss(b, self.losses, logits, scored, learns, ignore)
        for i, term in enumerate(self.losses if learns else ()):
            if isinstance(term, ModuleAhead):
                modules = Modules(term, i, trunk.stack, self.model.norm, self.model.head)
                loss = modules.lower(b, trunk.stream, targets, scored, trunk.context, loss, ignore)
        return self.shape.tables.program(b, {"loss": loss})

    def halves(self) -> tuple[Graph, Graph]:
        """Returns the program `score`, split into the two programs `features` and `nats`.

        `features` maps ids i64[B, T] to x [B, T, D], the input of the head. `nats` maps x and targets i64[B, T] to the
        cross-entropy of each token in nats, f32. The loss node of `nats` is outside of the head's scope, so that no
        compiler pass fuses this node. A fused loss that returns one value per token would have no gradient.
        """
        tables, b = self.shape.tables, Builder("features")
        x = self.trunk(b, LoweringContext(b.input("ids", TOKENS))).features
        first, features = tables.program(b, {"x": x}), b.types[x]
        b = Builder("nats")
        x, targets = b.input("x", features), b.input("targets", TOKENS)
        if self.model.head.tied:
            table = tables.params["embed.token"]
            b.param(table.name, TensorType(table.shape, table.dtype), table.init)
        logits = self.head(b, x)
        b.scope = ""
        nats = b.add("nats", CrossEntropy("none"), (logits, targets))
        return first, tables.program(b, {"nats": nats})

    def step(self, page: int) -> Graph:
        """Returns the program that appends tokens to R texts with paged caches. `page` is the number of positions per
        cache page.

        The inputs are `ids` i64[R, K]; `starts` i64[R], the number of cached tokens of each text; and `table` i64[R,
        N], the pages of each text. The outputs are the logits f32[R, V] of each text's last token, and the new pages.
        """
        b, paged = Builder("step"), replace(self, shape=replace(self.shape, page=page))
        ids = b.input("ids", TOKENS.with_shape("R", "K"))
        starts, table = b.input("starts", STARTS), b.input("table", TABLE)
        packed = b.add("packed", PackTexts(), (ids,))
        positions = b.add("positions", PackedPositions(), (ids, starts))
        paged.require_pages(page)
        trunk = paged.trunk(b, LoweringContext(packed, starts, positions=positions, table=table, extends=True))
        logits = self.head(b, b.add("last", LastOfTexts(), (trunk.features, table)))
        return self.shape.tables.program(b, {"logits": logits, **trunk.state})

    def require_codes(self) -> None:
        """Raises LoweringError if the cache holds 8-bit codes, but the model also has decoding state that cannot be
        stored as codes."""
        for name, type in self.states().items() if self.shape.coded else ():
            if type.floating and not name.endswith("_scale"):
                message = f"an 8-bit cache holds only keys, values and latents, but this model also stores {name}"
                hint = "remove `dtype` under `cache`, or what needs more than these, such as `pool`"
                raise LoweringError((Problem(("model", "cache", "dtype"), "S290", message, hint),))

    def require_pages(self, page: int) -> None:
        states = self.states()
        if not states:
            message = "a paged cache holds keys and values, but no layer of this model has any"
            raise LoweringError((Problem(("model", "cache"), "S290", message, "remove `cache`"),))
        for name, type in states.items():
            if type.shape[:2] != ("P", page):
                message = f"a paged cache holds only keys and values, but this model also stores {name}"
                hint = "remove `cache`, or what needs more than these, such as `document` in a mask, or `pool`"
                raise LoweringError((Problem(("model", "cache"), "S290", message, hint),))

    def states(self) -> Mapping[str, TensorType]:
        blocks = self.model.blocks
        parts = {step.title: step.state(self.shape) for step in self.model.embed}
        parts |= {value.name: value.state() for value in blocks.shared(self.shape)}
        others = {f"{part}.{key}": type for part, state in parts.items() for key, type in state.items()}
        return {**blocks.state(self.shape), **others}

    def prefill_and_decode(self) -> tuple[Graph, Graph]:
        """Returns two programs that append tokens to cached sequences. The first program appends any number of tokens
        to each sequence. The second program appends a single token.

        The inputs are ids i64[B, T] and `start` i64[], the number of tokens in the caches. The outputs are the logits
        f32[B, V] of the last token, and the new caches.
        """
        b = Builder("prefill")
        ids, start = b.input("ids", TOKENS), b.input("start", TOKENS.with_shape())
        trunk = self.trunk(b, LoweringContext(ids, start, extends=True))
        logits = self.head(b, b.add("last", Last(), (trunk.features,)))
        prefill = self.shape.tables.program(b, {"logits": logits, **trunk.state})
        return prefill, replace(retyped(prefill, _of_one_token), name="decode")

    def trunk(self, b: Builder, context: LoweringContext) -> _Trunk:
        """Adds the embedding, the blocks and the last norm to the program whose inputs are in `context`. If
        `context.extends` is true, the caches become inputs of the program."""
        blocks, norm = self.model.blocks, self.model.norm
        shared = SharedValues({"positions": context.positions} if context.positions else {})
        if any("reads_positions" in step.traits for step in self.model.embed):
            context = shared.with_positions(b, context)
        x, state = self.embedded(b, context)
        with refused_at(("model", "blocks", "common"), f"make the widths equal; the model's `dim` is {self.model.dim}"):
            context = shared.with_shared(b, blocks, self.shape, replace(context, embedded=x))
        caches = blocks.state(self.shape) if context.extends else {}
        cached = {key: b.input(f"cache.{key}", type) for key, type in caches.items()}
        stack = Stack(blocks, self.shape, CallSite("blocks", "block", ("model", "blocks"), self.phase))
        x, new = stack.run(b, x, replace(context, cache=cached))
        state |= shared.state | {f"cache.{key}": ref for key, ref in new.items()}
        return _Trunk(x if norm is None else norm.lower(b, x, "norm", self.shape), x, state, stack, context)

    def embedded(self, b: Builder, context: LoweringContext) -> tuple[str, dict[str, str]]:
        """Adds the embedding steps to the program. Returns the input of the first block, and the new values of the
        caches of the embedding steps, by the name of the cache."""
        x, state = "", dict[str, str]()
        b.scope = "embed"
        for i, step in enumerate(self.model.embed):
            width = b.types[x].width if x else self.shape.dim
            types = step.state(self.shape.of_width(width)) if context.extends else {}
            cache = {key: b.input(f"cache.embed.{step.title}.{key}", type) for key, type in types.items()}
            hint = "make the widths equal; a step reads the output of the step before it"
            with refused_at(("model", "embed", i), hint):
                lowered = step.lower(b, x, self.shape, replace(context, cache=cache))
            state |= {f"cache.embed.{step.title}.{key}": ref for key, ref in lowered.state.items()}
            x = lowered.value
        b.scope = ""
        return x, state

    def head(self, b: Builder, x: str) -> str:
        b.scope, hint = "head", f"make the widths equal; the model's `dim` is {self.model.dim}"
        with refused_at(("model", "head"), hint, related=(("the token table", ("model", "embed", 0)),)):
            return self.model.head.lower(b, x, self.shape, "@embed.token", self.title)


def _of_one_token(type: TensorType) -> TensorType:
    return type.with_shape(*(1 if dim == "T" else dim for dim in type.shape))


def _unread(programs: Programs, phase: Phase) -> tuple[str, ...]:
    read = read_by(programs, phase.train)
    return tuple(param.name for param in programs.params if param.name not in read)
