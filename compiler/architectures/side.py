"""One side of a model of pairs: its stages in order, over whole sequences or against a state."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.architectures.span import Span
from specc.compiler.blocks.roles import FunctionTable, Lowered, Part, Shape, Site, Surroundings, Tokens
from specc.compiler.ir import Builder, TensorType, TypeRuleError
from specc.compiler.ops.rope import Positions
from specc.compiler.ops.sequence import StateWrite
from specc.compiler.programs import LoweringError
from specc.compiler.strict import Path, Problem


def spans(stages: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """The first and last stage of each loop over time: from one that asks with a later state to that state's own."""
    titles = [stage.title for stage in stages]
    done = -1
    for i, stage in enumerate(stages):
        if stage.asks in titles[i:] and i > done:
            done = titles.index(stage.asks, i)
            yield i, done


@dataclass
class Side:
    """The stages of one side, and what is known of them: the features that each is given, by title."""

    name: str
    stages: Sequence[Part]
    shape: Shape
    functions: FunctionTable
    places: Mapping[str, Path]
    widths: dict[str, int] = field(default_factory=dict)

    def run(self, b: Builder, ids: str, around: Surroundings, start: str = "") -> tuple[str, dict[str, str]]:
        """Adds the stages over ids i64[B, T], of which `start` stand before where it `extends`; returns the last one's
        value and the state after the last token, by stage and key. `around.cache` is the state before, likewise."""
        run = _Run(self, b, ids, around, start)
        begins = dict(spans(self.stages))
        i = 0
        while i < len(self.stages):
            last = begins.get(i, i)
            if i in begins:
                run.span(self.stages[i : last + 1], i)
            else:
                run.stage(self.stages[i], i)
            i = last + 1
        return run.value, run.state

    def begin(self, b: Builder, around: Surroundings) -> dict[str, str]:
        """Adds what makes the state before the first token; returns it as `run` does."""
        run = _Run(self, b, "", around, "")
        begins = dict(spans(self.stages))
        state: dict[str, str] = {}
        i = 0
        while i < len(self.stages):
            last = begins.get(i, i)
            if i in begins:
                state |= Span(self.stages[i : last + 1], self.name, self.shape, self.functions, self.widths).begin(
                    b, run.around_of(self.stages[last])
                )
            else:
                stage = self.stages[i]
                b.scope = f"{self.name}.{stage.title}"
                begun = stage.begin(b, self.shape_of(stage), run.around_of(stage))
                state |= {f"{self.name}.{stage.title}.{key}": begun[key] for key in stage.state(self.shape_of(stage))}
            i = last + 1
        return state

    def state(self) -> Mapping[str, TensorType]:
        """What the stages keep between tokens, by stage and key. Known once the side has run."""
        return {
            f"{self.name}.{stage.title}.{key}": kept
            for stage in self.stages
            for key, kept in stage.state(self.shape_of(stage)).items()
        }

    def shape_of(self, stage: Part) -> Shape:
        return self.shape.of_width(self.widths[stage.title])

    def place(self, i: int) -> Path:
        return ("model", self.name, i)


@dataclass
class _Run:
    """The stages of a side in one program."""

    side: Side
    b: Builder
    ids: str
    around: Surroundings
    start: str
    value: str = ""
    values: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    own: dict[str, dict[str, str]] = field(default_factory=dict)  # shared in one stage, by its title
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
            around = self.around_of(stage)
            lowered = stage.lower(b, self.value, shape, around)
            lowered = replace(lowered, value=stage.dropped(b, lowered.value, around))
        except TypeRuleError as error:
            raise LoweringError((self.mismatch(error, i),)) from None
        self.keep(stage, lowered)

    def span(self, stages: Sequence[Part], i: int) -> None:
        """Adds a loop over time."""
        b, side = self.b, self.side
        given = {stage.reads: self.values[stage.reads] for stage in stages if stage.reads in self.values}
        loop = Span(stages, side.name, side.shape, side.functions, side.widths, i)
        try:
            lowered = loop.run(b, self.value, given, self.around_of(stages[-1]), self.around.cache)
        except TypeRuleError as error:
            raise LoweringError((self.mismatch(error, i),)) from None
        except LoweringError as error:
            raise LoweringError(tuple(problem.under("model", side.name) for problem in error.problems)) from None
        b.scope = f"{side.name}.{stages[-1].title}"
        self.keep(stages[-1], lowered)

    def check(self, stage: Part, i: int) -> None:
        """Raises LoweringError with what is wrong with a stage of this width."""
        width = self.side.widths[stage.title]
        if any(one.state() for one in stage.shared(self.side.shape_of(stage))):
            message = f"{stage.title} ends at documents, and a model of pairs reads lines"
            raise LoweringError((Problem(self.side.place(i), "S248", message, "leave `bos` out"),))
        if problems := tuple(problem.under(*self.side.place(i)) for problem in stage.problems_in(width)):
            raise LoweringError(problems)

    def keep(self, stage: Part, lowered: Lowered) -> None:
        """Takes a stage's value and its new state, which a recurrent stage that extends has yet to write."""
        prefix = f"{self.side.name}.{stage.title}"
        state = dict(lowered.state)
        if self.around.extends and stage.recurrent:
            for key, ref in state.items():
                state[key] = self.b.add(f"{key}.kept", StateWrite(), (self.around.cache[f"{prefix}.{key}"], ref))
        self.state |= {f"{prefix}.{key}": ref for key, ref in state.items()}
        self.value = self.values[stage.title] = lowered.value

    def width(self, stage: Part) -> int:
        """Features of what the stage is given; of the encoder's last state for one that starts from it."""
        ref = self.around.final.get("h", "") if stage.reads_final else self.value
        if stage.reads_final and not ref and not self.around.extends:
            problem = Problem(
                self.side.place(0),
                "S239",
                f"{stage.title} repeats the last state of the encoder, which has no recurrent stage",
                "put an lstm last in the encoder",
            )
            raise LoweringError((problem,))
        known = self.side.widths.get(stage.title, 0)
        width = self.b.types[ref].width if ref else known
        assert isinstance(width, int)
        return width

    def positioned(self, stage: Part, shape: Shape) -> None:
        """Adds the positions and what is shared of them, where the stage is the first to read them; and what it shares
        of the tokens."""
        b, wanted = self.b, stage.shared(shape)
        b.scope = self.side.name
        positional = any(one.positional for one in wanted)
        if not self.positions and (positional or stage.reads_positions or (self.around.extends and stage.in_place)):
            given = (self.ids, self.start) if self.around.extends else (self.ids,)
            self.positions = b.add("positions", Positions(), given)
        tokens = Tokens(self.ids, self.start, self.positions)
        own = self.own.setdefault(stage.title, {})
        for one in wanted:
            if not one.positional:  # of two stages they may have one name
                made = replace(one, name=f"{stage.title}_{one.name}").lower(b, tokens)
                own |= dict(zip(one.refs, made, strict=True))
            elif one.name not in self.shared:
                self.shared |= dict(zip(one.refs, one.lower(b, tokens), strict=True))

    def around_of(self, stage: Part) -> Surroundings:
        """What the stage can read."""
        side = self.side
        prefix = f"{side.name}.{stage.title}"
        cache = {
            key.removeprefix(f"{prefix}."): ref
            for key, ref in self.around.cache.items()
            if key.startswith(f"{prefix}.")
        }
        first = next((other for other in side.stages if other.recurrent), None)
        owner = f"{side.name}_{stage.title}".removesuffix("s")
        place = side.place(list(side.stages).index(stage))
        return replace(
            self.around,
            positions=self.positions,
            shared={**self.shared, **self.own.get(stage.title, {})},
            cache=cache,
            ids=self.ids,
            start=self.around.start if stage is first else {},
            values=self.values,
            site=Site(prefix, owner, place, side.places, side.functions),
        )

    def mismatch(self, error: TypeRuleError, i: int) -> Problem:
        """A type error in a stage, told with its place in the spec."""
        hint = "make the widths equal: each stage is given what the one before it makes"
        return Problem(self.side.place(i), "S301", error.message, hint)
