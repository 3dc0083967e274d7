"""One side of an encoder-decoder: its stages in order, over whole sequences or against a state."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.architectures.stage_names import owner_of
from specc.compiler.architectures.time_loop import Span, mismatch, spans
from specc.compiler.blocks.context import CallSite, FunctionTable, LoweringContext, Shape, Tokens
from specc.compiler.blocks.parts import Part
from specc.compiler.ir.graph import Builder, TensorType, TypeRuleError
from specc.compiler.ops.positions import Positions
from specc.compiler.ops.sequence import StateWrite
from specc.compiler.programs.programs import LoweringError
from specc.compiler.strict import Path, Problem


@dataclass
class Side:
    """One side of an encoder-decoder: its stages in order. `widths` holds the number of input features of each stage,
    by title."""

    name: str
    stages: Sequence[Part]
    shape: Shape
    functions: FunctionTable
    places: Mapping[str, Path]
    widths: dict[str, int] = field(default_factory=dict)

    def run(self, b: Builder, ids: str, context: LoweringContext, start: str = "") -> tuple[str, dict[str, str]]:
        """Adds the stages over ids i64[B, T].

        Args:
            b: the builder of the program.
            ids: the token ids, i64[B, T].
            context: the values that the stages can read. `context.cache` is the previous state, by stage and key.
            start: the number of tokens that precede `ids`, i64[], if `context.extends`.

        Returns:
            The last stage's value, and the state after the last token, by stage and key.

        Raises:
            LoweringError: if a stage does not fit the number of features of its input.
        """
        run = _Run(self, b, ids, context, start)
        for first, loop in self.parts():
            if loop is not None:
                run.span(loop)
            else:
                run.stage(self.stages[first], first)
        return run.value, run.state

    def begin(self, b: Builder, context: LoweringContext) -> dict[str, str]:
        """Adds the state before the first token and returns it by stage and key."""
        run = _Run(self, b, "", context, "")
        state: dict[str, str] = {}
        for first, loop in self.parts():
            if loop is not None:
                state |= loop.begin(b, run.context_of)
            else:
                stage = self.stages[first]
                b.scope = f"{self.name}.{stage.title}"
                begun = stage.begin(b, self.shape_of(stage), run.context_of(stage))
                state |= {f"{self.name}.{stage.title}.{key}": begun[key] for key in stage.state(self.shape_of(stage))}
        return state

    def parts(self) -> Iterator[tuple[int, Span | None]]:
        """Yields the parts of the side in order: the index of a stage outside loops and None, or the index of the first
        stage of a loop over time and the loop."""
        done = -1
        loops = {first: (number, last) for number, (first, last) in enumerate(spans(self.stages))}
        for i in range(len(self.stages)):
            if i in loops:
                number, done = loops[i]
                yield i, self._span(number, i, done)
            elif i > done:
                yield i, None

    def _span(self, number: int, first: int, last: int) -> Span:
        stages = self.stages[first : last + 1]
        later = {stage.reads for stage in self.stages[last + 1 :]}
        read = tuple(stage.title for stage in stages[:-1] if stage.title in later)
        before = self.stages[first - 1].title if first else ""
        place = self.place(first)
        return Span(stages, self.name, number, self.shape, self.functions, self.widths, place, before, read)

    def state(self) -> Mapping[str, TensorType]:
        """Returns the types of the state that the stages store between tokens, by stage and key. Valid only after
        `run`."""
        return {
            f"{self.name}.{stage.title}.{key}": type
            for stage in self.stages
            for key, type in stage.state(self.shape_of(stage)).items()
        }

    def shape_of(self, stage: Part) -> Shape:
        return self.shape.of_width(self.widths[stage.title])

    def place(self, i: int) -> Path:
        return ("model", self.name, i)


@dataclass
class _Run:
    """The lowering of a side's stages in one program."""

    side: Side
    b: Builder
    ids: str
    context: LoweringContext
    start: str
    value: str = ""
    values: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    by_stage: dict[str, dict[str, str]] = field(default_factory=dict)  # shared values of one stage, by its title
    state: dict[str, str] = field(default_factory=dict)
    positions: str = ""

    def stage(self, stage: Part, i: int) -> None:
        """Adds one stage."""
        b, side = self.b, self.side
        side.widths[stage.title] = self.width(stage)
        shape = side.shape_of(stage)
        self.check(stage, i)
        self.positioned(stage, shape)
        prefix = f"{side.name}.{stage.title}"
        b.scope = prefix
        try:
            context = self.context_of(stage)
            lowered = stage.lower(b, self.value, shape, context)
            lowered = replace(lowered, value=stage.dropped(b, lowered.value, context))
        except TypeRuleError as error:
            raise LoweringError((mismatch(error, *side.place(i)),)) from None
        self.write(stage, lowered.state)
        self.value = self.values[stage.title] = lowered.value

    def span(self, loop: Span) -> None:
        """Adds a loop over time."""
        given = {stage.reads: self.values[stage.reads] for stage in loop.stages if stage.reads in self.values}
        looped = loop.run(self.b, self.value, given, self.context_of, self.context.cache)
        for stage in loop.stages:
            if stage.recurrent:
                self.b.scope = f"{self.side.name}.{stage.title}"
                self.write(stage, looped.state[stage.title])
        self.values |= looped.values
        self.value = self.values[loop.stages[-1].title]

    def check(self, stage: Part, i: int) -> None:
        """Raises LoweringError if a stage has problems for its number of input features."""
        width = self.side.widths[stage.title]
        if any(value.state() for value in stage.shared(self.side.shape_of(stage))):
            message = f"{stage.title} has `bos`, but a model of pairs has lines and no documents"
            raise LoweringError((Problem(self.side.place(i), "S248", message, "remove `bos`"),))
        shape = self.side.shape_of(stage)
        refusals = (*stage.problems_in(width), *stage.problems_of_context(shape.context, self.context.causal))
        if problems := tuple(problem.under(*self.side.place(i)) for problem in refusals):
            raise LoweringError(problems)

    def write(self, stage: Part, state: Mapping[str, str]) -> None:
        """Records a stage's new state. In a program that extends a sequence, also writes the state of a recurrent stage
        to its cache."""
        prefix = f"{self.side.name}.{stage.title}"
        state = dict(state)
        if self.context.extends and stage.recurrent:
            for key, ref in state.items():
                state[key] = self.b.add(f"{key}.kept", StateWrite(), (self.context.cache[f"{prefix}.{key}"], ref))
        self.state |= {f"{prefix}.{key}": ref for key, ref in state.items()}

    def width(self, stage: Part) -> int:
        """Returns the number of features of the stage's input; of the encoder's last state if the stage starts
        from it."""
        ref = self.context.final.get("h", "") if stage.reads_final else self.value
        if stage.reads_final and not ref and not self.context.extends:
            problem = Problem(
                self.side.place(0),
                "S239",
                f"{stage.title} repeats the last state of the encoder, but the encoder has no recurrent stage",
                "put an lstm last in the encoder",
            )
            raise LoweringError((problem,))
        known = self.side.widths.get(stage.title, 0)
        width = self.b.types[ref].width if ref else known
        assert isinstance(width, int)
        return width

    def positioned(self, stage: Part, shape: Shape) -> None:
        """Adds the positions, if the stage is the first to read them, and the shared computations of the stage."""
        b, side, wanted = self.b, self.side, stage.shared(shape)
        b.scope = side.name
        positional = any(value.positional for value in wanted)
        if not self.positions and (positional or stage.reads_positions or (self.context.extends and stage.in_place)):
            given = (self.ids, self.start) if self.context.extends else (self.ids,)
            self.positions = b.add("positions", Positions(), given)
        tokens = Tokens(self.ids, self.start, self.positions, embedded=self.value)
        values = self.by_stage.setdefault(stage.title, {})
        for value in wanted:
            if not value.positional:  # two stages may share a name for different values
                b.scope = f"{side.name}.{stage.title}"
                values |= dict(zip(value.refs, value.lower(b, tokens), strict=True))
                b.scope = side.name
            elif value.name not in self.shared:
                self.shared |= dict(zip(value.refs, value.lower(b, tokens), strict=True))

    def context_of(self, stage: Part) -> LoweringContext:
        """Returns the values that the stage can read."""
        side = self.side
        prefix = f"{side.name}.{stage.title}"
        cache = {
            key.removeprefix(f"{prefix}."): ref
            for key, ref in self.context.cache.items()
            if key.startswith(f"{prefix}.")
        }
        first = next((other for other in side.stages if other.recurrent), None)
        place = side.place(list(side.stages).index(stage))
        return replace(
            self.context,
            positions=self.positions,
            shared={**self.shared, **self.by_stage.get(stage.title, {})},
            cache=cache,
            ids=self.ids,
            start=self.context.start if stage is first else {},
            values=self.values,
            site=CallSite(prefix, owner_of(side.name, stage), place, side.places, side.functions),
        )
