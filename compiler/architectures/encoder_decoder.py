"""An encoder-decoder, which maps a source line to a target line, one token at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.architecture import Architecture, Form
from specc.compiler.architectures.blocks_stage import BlocksStage
from specc.compiler.architectures.circuit import STREAM, Circuit
from specc.compiler.architectures.side import Side, groups
from specc.compiler.architectures.stage_rules import name_problems, position_problems
from specc.compiler.architectures.time_loop import run
from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.parts import Bridge, Layer, Part, Stage
from specc.compiler.catalog import Kinds
from specc.compiler.changing_values import Schedule
from specc.compiler.characters import PAD, START, Vocabulary
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.types import TensorType
from specc.compiler.losses.term import LossTerm, add_loss, declare_weights
from specc.compiler.ops.sequence import Copy, Seen, Shift
from specc.compiler.ops.shape import Last
from specc.compiler.programs.init import Init
from specc.compiler.programs.programs import LoweringError, Programs, refused_at
from specc.compiler.programs.tables import Tables
from specc.compiler.strict import Path, Problem, values_in

if TYPE_CHECKING:
    AnyBridge = Bridge
    AnyStage = Part
else:
    AnyBridge, AnyStage = Kinds(blocks, Bridge), Kinds(blocks, Stage, Layer, BlocksStage)

Stages = Annotated[tuple[AnyStage, ...], Field(min_length=1, max_length=64)]
SOURCE, TARGET = (TensorType(("B", dim), "i64") for dim in ("S", "T"))


class EncoderDecoder(Architecture):
    """Sequence to sequence (Sutskever, Vinyals and Le, 2014): an encoder reads a source, and a decoder writes a
    target.

    The encoder and the decoder are lists of stages. Only a stage `blocks` has residual branches.

    Attributes:
        vocab: the characters of the source and target lines.
        context: the maximum number of tokens of a source, and of a target.
        dtype: the compute dtype. By default, the dtype of the target machine.
        init: the initialization of matrices.
        output_init: the initialization of matrices that write to a residual stream. By default, `init`.
        encoder: the stages of the encoder.
        bridge: the part that computes the first state of the decoder from the last state of a recurrent encoder. By
            default, the first state is 0.
        decoder: the stages of the decoder.
        head: the computation of logits.
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
    head: LogitHead = LogitHead.model_construct()

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
        return any("recurrent" in stage.traits for stage in self.encoder)

    @property
    def layers(self) -> int:
        """The value of `layers` in formulas outside of stacks: the number of blocks of encoder and decoder, at least
        1."""
        return max(1, sum(stage.blocks for stage in (*self.encoder, *self.decoder)))

    @property
    def characters(self) -> str | None:
        return self.vocab.chars

    def problems(self) -> Iterator[Problem]:
        for side, stages in (("encoder", self.encoder), ("decoder", self.decoder)):
            for problem in Circuit(layers=stages).problems((STREAM,), (), None, self.layers):
                yield problem.moved(lambda path, side=side: (side, *path[1:]))  # type: ignore[misc]
            yield from position_problems(side, stages)
            yield from name_problems(side, stages)
        for path, _ in values_in(self, Schedule):
            hint = "write the last value of the schedule; in this kind of model, only `train` can have schedules"
            message = f"`{path[-1]}` cannot have a schedule in a model of kind `encoder_decoder`"
            yield Problem((*path, "at"), "S267", message, hint)
        if self.bridge is None and not any({"reads_source", "reads_final"} & stage.traits for stage in self.decoder):
            hint = "add attention with `of: encoder` to the decoder, or a `bridge:` if both sides have an lstm"
            yield Problem(("decoder",), "S253", "no stage of the decoder reads the encoder", hint)

    def lower(self, name: str, halves: bool = False, losses: Sequence[LossTerm] = ()) -> Programs:
        return _Lowering(self, name, losses).run()


def _places(model: EncoderDecoder) -> Iterator[tuple[str, Path]]:
    yield "head", ("model", "head")
    yield "bridge", ("model", "bridge")
    for side, stages in (("encoder", model.encoder), ("decoder", model.decoder)):
        for loop, first, group in groups(stages):
            for i, stage in enumerate(group, first):
                yield f"{side}.{stage.title}", ("model", side, i)
                if loop:
                    yield f"{side}.{loop}.{stage.title}", ("model", side, i)
                yield from ((f"{side}.{stage.title}.{name}", ("model", side, i, *path)) for name, path in stage.places)


class _Lowering:
    """Lowers one encoder-decoder."""

    def __init__(self, model: EncoderDecoder, name: str, losses: Sequence[LossTerm]) -> None:
        self.model, self.name, self.losses = model, name, losses
        out = model.output_init or model.init
        self.tables = Tables(model.layers, dict(_places(model)))
        vocab = self.tables.size("V", model.vocabulary, "tokens")
        shape = Shape(0, self.tables, model.context, vocab, model.init, out, cache_length=model.context)
        self.encoder = Side("encoder", model.encoder, replace(shape, causal=False))
        self.decoder = Side("decoder", model.decoder, shape)
        self.reads_source = any("reads_source" in stage.traits for stage in model.decoder)
        self.reads_seen = any("reads_seen" in stage.traits for stage in model.encoder)

    def run(self) -> Programs:
        programs = (self.scored("train"), self.scored("score"), self.encode(), self.extend())
        return self.tables.programs(self.name, programs, ("train", "score"), self.model.context, self.model.place_of)

    def scored(self, name: Literal["train", "score"]) -> Graph:
        """Returns a program that maps a source i64[B, S] and a target i64[B, T] to the cross-entropy of the target in
        nats, f32. Padding does not contribute to the cross-entropy.

        The program `train` applies dropout, and returns the mean over all tokens. The third input of `train` is
        `inputs` i64[B, T], the decoder inputs. The program `score` uses teacher forcing, and returns one value per
        token, 0 at padding.
        """
        b = Builder(name)
        source = b.input("source", SOURCE)
        inputs = b.input("inputs", TARGET) if name == "train" else ""
        target = b.input("target", TARGET)
        if name == "train":
            declare_weights(b, self.losses)
        context = self.read(b, source, name == "train")
        b.scope = ""
        ids = inputs or b.add("inputs", Shift(START), (target,))
        x, _ = run(self.decoder, b, replace(context, ids=ids))
        logits = self.head(b, x)
        return self.tables.program(b, {"loss": add_loss(b, self.losses, logits, target, name == "train", PAD)})

    def encode(self) -> Graph:
        """Returns the program that maps a source i64[B, S] to the state before the first token."""
        b = Builder("encode")
        context = self.read(b, b.input("source", SOURCE), False)
        begun: dict[str, str] = {}
        for loop, _, stages in groups(self.decoder.stages):
            begun |= self.decoder.begin(b, context, loop, stages)
        state = {"encoder.seen": context.seen} if self.reads_source else {}
        state |= {key: begun[key] for key in self.decoder.state()}
        b.scope = ""
        for i, (key, ref) in enumerate(state.items()):
            if ref in list(state.values())[:i]:
                state[key] = b.add(f"{key}.copy", Copy(), (ref,))
        return self.tables.program(b, {f"state.{key}": ref for key, ref in state.items()})

    def extend(self) -> Graph:
        """Returns the program of one decoding step. The inputs are ids i64[B, 1] and `start` i64[], the number of
        earlier tokens. The outputs are the logits f32[B, V] of the next token, and the new state."""
        b = Builder("extend")
        ids = b.input("ids", TARGET.with_shape("B", 1))
        start = b.input("start", TARGET.with_shape())
        seen = b.input("state.encoder.seen", TensorType(("B", "S"), "bool")) if self.reads_source else ""
        cache = {key: b.input(f"state.{key}", type) for key, type in self.decoder.state().items()}
        x, state = run(self.decoder, b, LoweringContext(ids, start, cache=cache, seen=seen, extends=True))
        b.scope = ""
        logits = self.head(b, b.add("last", Last(), (x,)))
        return self.tables.program(b, {"logits": logits, **{f"state.{key}": ref for key, ref in state.items()}})

    def read(self, b: Builder, source: str, training: bool) -> LoweringContext:
        """Adds the encoder to the program. Returns the lowering context of the decoder. `source` is the input with the
        source tokens, and `training` states whether to apply dropout."""
        b.scope = "encoder"
        seen = ""
        if self.reads_source or self.reads_seen:
            seen = b.add("seen", Seen(PAD), (source,))
        memory, final = run(self.encoder, b, LoweringContext(source, seen=seen, training=training))
        self.decoder.shape = replace(self.decoder.shape, source=b.types[memory].width)
        last = next((stage.title for stage in reversed(self.model.encoder) if "recurrent" in stage.traits), None)
        states = {key: final[f"encoder.{last}.{key}"] for key in ("h", "c")} if last else {}
        return LoweringContext(memory=memory, seen=seen, final=states, initial=self.start(b, states), training=training)

    def start(self, b: Builder, final: dict[str, str]) -> dict[str, str]:
        """Adds the nodes of the bridge. Returns the initial state of the decoder's first recurrent stage, by key. The
        result is empty without a bridge. `final` is the last state of the encoder, by key.

        Raises LoweringError if the encoder or the decoder has no recurrent stage, or if the bridge's output and the
        decoder's state differ in width.
        """
        bridge = self.model.bridge
        first = next((stage for stage in self.model.decoder if "recurrent" in stage.traits), None)
        if bridge is None:
            return {}
        b.scope = "bridge"
        if first is None or not final:
            side = "decoder" if first is None else "encoder"
            message = f"`bridge` needs an lstm on both sides, but the {side} has none"
            raise LoweringError((Problem(("model", "bridge"), "S238", message, "remove `bridge`"),))
        width = first.state(self.decoder.shape)["h"].width
        assert isinstance(width, int)
        with refused_at(("model", "bridge"), "use `bridge: linear`"):
            return dict(bridge.lower(b, final["h"], final["c"], width, self.decoder.shape))

    def head(self, b: Builder, x: str) -> str:
        b.scope, head, shape = "head", self.model.head, self.decoder.shape.of_width(b.types[x].width)
        place, hint = ("model", "head"), "set `tied: false`, or make the widths equal"
        table = f"@decoder.{self.model.decoder[0].title}.token"
        if head.tied and table not in b.types:
            message = "`head` is tied to the token table of the decoder, but the decoder has none"
            begin = "set `tied: false`, or begin the decoder with `embed`"
            raise LoweringError((Problem(place, "S301", message, begin),))
        with refused_at(place, hint):
            return head.lower(b, x, shape, table)
