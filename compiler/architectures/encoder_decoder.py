"""An encoder-decoder: maps a source line to a target line, one token at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.architecture import Architecture, Form
from specc.compiler.architectures.blocks import one_of
from specc.compiler.architectures.blocks_stage import BlocksStage
from specc.compiler.architectures.function_table import Functions
from specc.compiler.architectures.side import Side
from specc.compiler.architectures.stage_names import collisions
from specc.compiler.architectures.time_loop import spans, step_name
from specc.compiler.blocks.context import LoweringContext, Shape, SizeNames
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.init import Init
from specc.compiler.blocks.parts import Bridge, Layer, Part, Stage
from specc.compiler.catalog import models
from specc.compiler.characters import PAD, START, Vocabulary
from specc.compiler.ir.graph import Builder, Graph, TensorType, TypeRuleError
from specc.compiler.losses.term import LossTerm, add_loss, declare_weights
from specc.compiler.ops.sequence import Copy, Seen, Shift
from specc.compiler.ops.shape import Last
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.schedule import schedules_in
from specc.compiler.strict import Path, Problem

if TYPE_CHECKING:
    AnyBridge = Bridge
    AnyStage = Part
else:
    AnyBridge = one_of(Bridge)
    _STAGES = (*models(blocks, Stage, "kind"), *models(blocks, Layer, "kind"), BlocksStage)
    AnyStage = Annotated[Union[_STAGES], Field(discriminator="kind")]  # noqa: UP007

Stages = Annotated[tuple[AnyStage, ...], Field(min_length=1, max_length=64)]
IDS = "i64"
AHEAD = "use `directions: forward`"
BEFORE_THE_LOOP = "put it before the stage that attends with the state of a later stage"


class EncoderDecoder(Architecture):
    """Sequence to sequence (Sutskever, Vinyals and Le, 2014): an encoder reads a source, and a decoder writes a target.

    Each side is its stages in order, with residual branches only in `blocks`.

    Attributes:
        vocab: the characters of the lines.
        context: the most tokens of a source and of a target.
        dtype: the compute dtype; that of the target if unset.
        init: the initialization of matrices.
        output_init: the initialization of matrices that write to a residual stream; `init` if unset.
        encoder: the stages of the encoder.
        bridge: computes the first state of the decoder from the last state of a recurrent encoder. If unset, the state
            starts at 0.
        decoder: the stages of the decoder.
        head: the step to logits.
    """

    reads: ClassVar[Form] = "lines"

    kind: Literal["encoder_decoder"]
    vocab: Vocabulary
    context: Annotated[int, Field(gt=0, le=2**16)]
    dtype: Literal["f32"] | None = None
    init: Init = Init(normal=0.02)
    output_init: Init | None = None
    encoder: Stages
    bridge: AnyBridge | None = None
    decoder: Stages
    head: LogitHead = LogitHead()

    @property
    def computes_in(self) -> str | None:
        return self.dtype

    @property
    def title(self) -> str:
        sides = (" + ".join(stage.title for stage in side) for side in (self.encoder, self.decoder))
        return f"encoder {next(sides)}, decoder {next(sides)}, {self.context} tokens, vocabulary {self.vocabulary}"

    @property
    def vocabulary(self) -> int:
        return self.vocab.size

    @property
    def window(self) -> int:
        return self.context

    @property
    def scored_input(self) -> str:
        return "target"

    @property
    def reads_pads(self) -> bool:
        return any(stage.recurrent for stage in self.encoder)

    @property
    def characters(self) -> str | None:
        return self.vocab.chars

    def problems(self) -> Iterator[Problem]:
        """Yields the problems of stages at their positions in the model."""
        for side, stages in (("encoder", self.encoder), ("decoder", self.decoder)):
            titles: dict[str, int] = {}
            for i, stage in enumerate(stages):
                if (first := titles.setdefault(stage.title, i)) != i:
                    message = f"two stages of the {side} have the name {stage.title}"
                    related = (("first use", (side, first)),)
                    yield Problem((side, i), "S207", message, "give one of them a `name:`", related)
                yield from (problem.under(side, i) for problem in _stage_problems(side, stages, i))
            yield from collisions(side, stages)
        for path, _ in schedules_in(self):
            hint = "write the last value, or schedule a number of `train`"
            yield Problem((*path, "at"), "S267", "a model of kind encoder_decoder has no schedules", hint)
        if self.bridge is None and not any(stage.reads_source or stage.reads_final for stage in self.decoder):
            hint = "give the decoder attention `of: encoder`, or put a `bridge:` between recurrent stages of both sides"
            yield Problem(("decoder",), "S253", "no stage of the decoder reads the encoder", hint)

    def lower(self, name: str, dtype: str, halves: bool = False, losses: Sequence[LossTerm] = ()) -> Programs:
        return _Lowering(self, name, dtype, losses).run()


def _stage_problems(side: str, stages: tuple[Part, ...], i: int) -> Iterator[Problem]:
    """Yields the problems of a stage at its position. Paths are relative to the stage."""
    stage = stages[i]
    if stage.starts != (i == 0):
        what = (
            f"the {side} starts with {stage.title}" if i == 0 else f"{stage.title} is not the first stage of the {side}"
        )
        yield Problem((), "S233", what, "put `embed` (or, in a decoder, `repeat`) first, and only there")
    if side == "encoder" and (stage.reads_source or stage.query_stage is not None or stage.reads_final):
        yield Problem(
            (), "S234", f"{stage.title} reads an encoder, but is a stage of the encoder", "move it to the decoder"
        )
    if side == "decoder" and stage.reads_future:
        yield Problem((), "S235", f"{stage.title} reads later tokens, which the decoder has not generated yet", AHEAD)
    before, after = stages[:i], stages[i + 1 :]
    if stage.reads is not None and all(other.title != stage.reads for other in before):
        yield Problem(
            (), "S236", f"{stage.title} reads {stage.reads}, which is not an earlier stage", "name an earlier stage"
        )
    if stage.query_stage is not None and all(
        other.title != stage.query_stage or not other.recurrent for other in after
    ):
        message = f"{stage.title} attends with the state of {stage.query_stage}, which is not a later recurrent stage"
        yield Problem((), "S236", message, "name an lstm that follows it")
    for name in ("learn", "read", *stage.inner, "write") if isinstance(stage, Layer) else ():
        if getattr(stage, name):
            message = (
                f"{stage.title} sets {name}, which is of residual branches, and outside of blocks no stage has one"
            )
            yield Problem((name,), "S252", message, f"remove `{name}`, or move the layer to `blocks`")
    inside = next((stage for first, last in spans(stages) if first < i <= last), None)
    if inside is not None and not stage.recurrent and stage.in_place:
        message = f"{stage.title} writes its cache in place, which is not possible in a loop over time"
        yield Problem((), "S237", message, BEFORE_THE_LOOP)
    elif inside is not None and isinstance(stage, BlocksStage):
        message = f"{stage.title} consists of several functions, which is not possible in a loop over time"
        yield Problem((), "S237", message, BEFORE_THE_LOOP)


def _places(model: EncoderDecoder) -> Iterator[tuple[str, Path]]:
    """Yields pairs of a node-name prefix and the path of the part of the spec that created the node."""
    yield "head", ("model", "head")
    yield "bridge", ("model", "bridge")
    for side, stages in (("encoder", model.encoder), ("decoder", model.decoder)):
        looped = {i: step_name(n) for n, (first, last) in enumerate(spans(stages)) for i in range(first, last + 1)}
        for i, stage in enumerate(stages):
            yield f"{side}.{stage.title}", ("model", side, i)
            if i in looped:
                yield f"{side}.{looped[i]}.{stage.title}", ("model", side, i)
            for j, layer in enumerate(getattr(stage, "layers", ())):
                for k in range(getattr(stage, "count", 0)):
                    yield f"{side}.{stage.title}.{k}.{layer.title}", ("model", side, i, "layers", j)


class _Lowering:
    """The lowering of one encoder-decoder."""

    def __init__(self, model: EncoderDecoder, name: str, dtype: str, losses: Sequence[LossTerm]) -> None:
        self.model, self.name, self.losses = model, name, losses
        stages: tuple[Any, ...] = (*model.encoder, *model.decoder)
        layers = max(1, sum(stage.count for stage in stages if isinstance(stage, BlocksStage)))
        kind = model.dtype or dtype
        out = model.output_init or model.init
        names = SizeNames()
        vocab = names.size("V", model.vocabulary, "tokens", "V")
        shape = Shape(0, layers, model.context, vocab, kind, model.init, out, kept=model.context, names=names)
        self.functions = Functions(layers)
        self.places = dict(_places(model))
        self.encoder = Side("encoder", model.encoder, shape, self.functions, self.places)
        self.decoder = Side("decoder", model.decoder, shape, self.functions, self.places)
        self.reads_source = any(stage.reads_source for stage in model.decoder)
        self.reads_seen = any(stage.reads_seen for stage in model.encoder)

    def run(self) -> Programs:
        programs = (self.scored("train"), self.scored("score"), self.encode(), self.extend())
        if refused := self.functions.refused:
            hint = "change the number or formula"
            raise LoweringError(tuple(Problem(("model",), "S221", text, hint) for text in refused.values()))
        params, functions = tuple(self.functions.params.values()), tuple(self.functions.graphs.values())
        places = tuple(self.places.items())
        whole = ("train", "score")
        constants = tuple((name, *constant) for name, constant in self.functions.constants.items())
        context = self.model.context
        lowered = Programs(self.name, params, functions, programs, places, whole, context=context, constants=constants)
        sizes = tuple((name, *size) for name, size in self.decoder.shape.names.values.items())
        return replace(lowered, sizes=sizes, layers=self.functions.layers)

    def scored(self, name: Literal["train", "score"]) -> Graph:
        """Returns the program source i64[B, S], target i64[B, T] -> cross-entropy in nats, f32, over the targets that
        are not pads.

        `train` returns the mean and applies dropout. It has a third input, the decoder inputs `inputs` i64[B, T].
        `score` returns one value per token, 0 at pads, with teacher-forced inputs.
        """
        b = Builder(name)
        source = b.input("source", TensorType(("B", "S"), IDS))
        given = TensorType(("B", "T"), IDS)
        inputs = b.input("inputs", given) if name == "train" else ""
        target = b.input("target", given)
        if name == "train":
            declare_weights(b, self.losses)
        context = self.read(b, source, name == "train")
        b.scope = ""
        ids = inputs or b.add("inputs", Shift(START), (target,))
        x, _ = self.decoder.run(b, ids, context)
        logits = self.head(b, x)
        return self.functions.program(b, {"loss": add_loss(b, self.losses, logits, target, name == "train", PAD)})

    def encode(self) -> Graph:
        """Returns the program source i64[B, S] -> the state before the first token."""
        b = Builder("encode")
        context = self.read(b, b.input("source", TensorType(("B", "S"), IDS)), False)
        begun = self.decoder.begin(b, context)
        state = {"encoder.seen": context.seen} if self.reads_source else {}
        state |= {key: begun[key] for key in self.decoder.state()}
        b.scope = ""
        for i, (key, ref) in enumerate(state.items()):
            if ref in list(state.values())[:i]:
                state[key] = b.add(f"{key}.copy", Copy(), (ref,))
        return self.functions.program(b, {f"state.{key}": ref for key, ref in state.items()})

    def extend(self) -> Graph:
        """Returns the program ids i64[B, 1], the token after `start` (i64[]) tokens -> logits f32[B, V] of the next
        token, and the new state."""
        b = Builder("extend")
        ids = b.input("ids", TensorType(("B", 1), IDS))
        start = b.input("start", TensorType((), IDS))
        seen = b.input("state.encoder.seen", TensorType(("B", "S"), "bool")) if self.reads_source else ""
        cache = {key: b.input(f"state.{key}", type) for key, type in self.decoder.state().items()}
        x, state = self.decoder.run(b, ids, LoweringContext("", {}, cache, seen=seen, extends=True), start)
        b.scope = ""
        logits = self.head(b, b.add("last", Last(), (x,)))
        return self.functions.program(b, {"logits": logits, **{f"state.{key}": ref for key, ref in state.items()}})

    def read(self, b: Builder, source: str, training: bool) -> LoweringContext:
        """Adds the encoder and returns the lowering context of the decoder."""
        b.scope = "encoder"
        seen = ""
        if self.reads_source or self.reads_seen:
            seen = b.add("seen", Seen(PAD), (source,))
        whole = LoweringContext("", {}, {}, seen=seen, causal=False, training=training)
        memory, final = self.encoder.run(b, source, whole)
        self.decoder.shape = replace(self.decoder.shape, source=b.types[memory].width)
        last = next((stage.title for stage in reversed(self.model.encoder) if stage.recurrent), None)
        states = {key: final[f"encoder.{last}.{key}"] for key in ("h", "c")} if last else {}
        return LoweringContext(
            "", {}, {}, memory=memory, seen=seen, final=states, start=self.start(b, states), training=training
        )

    def start(self, b: Builder, final: dict[str, str]) -> dict[str, str]:
        """Adds the bridge and returns the initial state of the decoder's first recurrent stage, by key. Returns an
        empty dict if the model has no bridge.

        Raises LoweringError if a side has no recurrent stage, or if the bridge does not return the features of the
        decoder's state.
        """
        bridge = self.model.bridge
        first = next((stage for stage in self.model.decoder if stage.recurrent), None)
        if bridge is None:
            return {}
        b.scope = "bridge"
        if first is None or not final:
            side = "decoder" if first is None else "encoder"
            message = f"the bridge needs a recurrent stage on both sides, but the {side} has none"
            raise LoweringError((Problem(("model", "bridge"), "S238", message, "remove the bridge"),))
        width = first.state(self.decoder.shape)["h"].width
        assert isinstance(width, int)
        try:
            return dict(bridge.lower(b, final["h"], final["c"], width, self.decoder.shape))
        except TypeRuleError as error:
            raise LoweringError(
                (Problem(("model", "bridge"), "S301", error.message, "use `bridge: linear`"),)
            ) from None

    def head(self, b: Builder, x: str) -> str:
        b.scope = "head"
        width = b.types[x].width
        try:
            return self.model.head.lower(
                b, x, self.decoder.shape.of_width(width), f"@decoder.{self.model.decoder[0].title}.token"
            )
        except (TypeRuleError, KeyError) as error:
            message = (
                error.message
                if isinstance(error, TypeRuleError)
                else "the head is tied, but the decoder has no token table"
            )
            raise LoweringError(
                (Problem(("model", "head"), "S301", message, "set `tied: false`, or make the widths equal"),)
            ) from None
