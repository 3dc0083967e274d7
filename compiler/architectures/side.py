"""The encoder or the decoder of an encoder-decoder, called a side. The stages of a side run in order. Each stage
belongs directly to the program, or to a loop over time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.architectures.function import begin_parts, below
from specc.compiler.architectures.scope import Scope
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape
from specc.compiler.blocks.parts import Part
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import STEP
from specc.compiler.programs.programs import LoweringError, refused_at
from specc.compiler.strict import Path, Problem


def groups(stages: Sequence[Part]) -> Iterator[tuple[str, int, Sequence[Part]]]:
    """Yields an entry for each loop over time and for each stage outside of loops. An entry has the name of the loop
    (empty outside of loops), the index of the first stage, and the stages.

    A loop begins at a stage whose attention query is the state of a later stage, and ends at that later stage. Another
    stage in the loop may also have the state of a later stage as its query. The loop then extends to the last of these
    later stages.
    """
    titles = [stage.title for stage in stages]
    first, count = 0, 0
    while first < len(stages):
        last = i = first
        while i <= last:
            if (query := stages[i].query_stage) in titles[i:]:
                last = max(last, titles.index(query, i))
            i += 1
        looped = last > first
        count += looped
        yield (f"{STEP}{count if count > 1 else ''}" if looped else ""), first, stages[first : last + 1]
        first = last + 1


def owner_of(side: str, stage: Part) -> str:
    """Returns the base name of the generated class that contains the functions of a stage. `side` is `encoder` or
    `decoder`."""
    return f"{side}_{stage.title}".removesuffix("s")


@dataclass
class Side:
    """The encoder or the decoder of an encoder-decoder.

    Attributes:
        name: `encoder` or `decoder`.
        stages: The stages, in order.
        shape: The sizes of the model.
        widths: The number of input features of each added stage, by title.
    """

    name: str
    stages: Sequence[Part]
    shape: Shape
    widths: dict[str, int] = field(default_factory=dict)

    def shape_of_learned(self, path: str) -> Shape:
        return self.shape_of(next(stage for stage in self.stages if path.startswith(f"{stage.title}.")))

    def shape_of(self, stage: Part) -> Shape:
        width = self.widths.get(stage.title, 0)
        return replace(self.shape, dim=width, blocks=stage.blocks).of_attention(stage.sizes(width) if width else {})

    def state(self, stages: Sequence[Part] | None = None) -> Mapping[str, TensorType]:
        """Returns the types of the decoding state, such as caches, by side, stage and key. `stages` contains stages
        that were already added. If None, the result contains the state of all stages."""
        return {
            f"{self.name}.{stage.title}.{key}": type
            for stage in (self.stages if stages is None else stages)
            for key, type in stage.state(self.shape_of(stage)).items()
        }

    def place(self, stage: Part) -> Path:
        return ("model", self.name, list(self.stages).index(stage))

    def inside(self, stage: Part, context: LoweringContext) -> LoweringContext:
        """Returns a copy of `context` for a stage outside of loops. The copy has the call site of the stage, and only
        the entries of the cache that belong to the stage. The initial state of `context` is kept for the first
        recurrent stage, and removed for all other stages."""
        at = f"{self.name}.{stage.title}"
        first = next((other for other in self.stages if "recurrent" in other.traits), None)
        initial = context.initial if stage is first else {}
        site = CallSite(at, owner_of(self.name, stage), self.place(stage))
        return replace(context, cache=below(f"{at}.", context.cache), initial=initial, site=site)

    def begin(self, b: Builder, context: LoweringContext, loop: str, stages: Sequence[Part]) -> dict[str, str]:
        """Adds the nodes that compute the initial state of one stage, or of all stages of a loop.

        Args:
            b: The builder of the program.
            context: The values that the stages can read.
            loop: The name of the loop, or "" for a stage outside of loops.
            stages: The stage, or the stages of the loop.

        Returns:
            The initial state, by side, stage and key.
        """
        state: dict[str, str] = {}
        inner = [(stage, self.shape_of(stage)) for stage in stages if loop and "recurrent" not in stage.traits]
        for stage in stages:
            if not loop or "recurrent" in stage.traits:
                b.scope = f"{self.name}.{stage.title}"
                begun = stage.begin(b, self.shape_of(stage), self.inside(stage, context))
                state |= {f"{b.scope}.{key}": begun[key] for key in stage.state(self.shape_of(stage))}
        b.scope, at = self.name, f"{self.name}.{loop}"
        begun = begin_parts(b, inner, context, (f"{self.name}_{loop}.begin",), at, f"{loop}.begin")
        return state | {f"{self.name}.{key}": ref for key, ref in begun.items()}

    def input(self, scope: Scope, stage: Part, context: LoweringContext) -> str:
        """Returns the input of a stage, and records the number of features of this input in `widths`. For a stage that
        repeats the encoder's last state, `widths` instead records the number of features of that state."""
        x = scope.input(stage)
        ref = context.final.get("h", "") if "reads_final" in stage.traits else x
        if "reads_final" in stage.traits and not ref and not context.extends:
            message = f"{stage.title} repeats the last state of an lstm of the encoder, but the encoder has no lstm"
            raise LoweringError((Problem(self.place(stage), "S239", message, "put an lstm last in the encoder"),))
        width = scope.b.types[ref].width if ref else self.widths.get(stage.title, 0)
        assert isinstance(width, int)
        self.widths[stage.title] = width
        scope.shape = self.shape_of(stage)
        return x

    def add(self, scope: Scope, stage: Part, x: str, context: LoweringContext) -> Mapping[str, str]:
        """Adds the nodes of a stage to a program or function. Returns the new state of the stage, by side, stage and
        key.

        Args:
            scope: The values that expressions of the program or function can read.
            stage: The stage.
            x: The input of the stage.
            context: The values that the stage can read. `context.cache` is the state of the stage.

        Raises:
            LoweringError: If the stage cannot process an input with this number of features.
        """
        self._check(stage)
        scope.enter("")
        with refused_at(self.place(stage), "make the widths equal; a stage reads the output of the stage before it"):
            context = scope.shared.with_shared(scope.b, stage, scope.shape, replace(context, embedded=x))
            state = scope.add(stage, x, replace(context, values=dict(scope.values)), "y")
        scope.values[stage.title] = scope.value
        return {f"{self.name}.{stage.title}.{key}": ref for key, ref in state.items()}

    def _check(self, stage: Part) -> None:
        shape = self.shape_of(stage)
        problems = list(stage.problems_in(shape))
        for name, learned in stage.learned.items():
            problems += learned.size_problem(shape.sizes, "learn", name)
        if any(value.state() for value in stage.shared(shape)):
            message = f"{stage.title} sets `bos`, the id that starts a document, but this model reads lines"
            problems = [Problem((), "S248", message, "remove `bos`")]
        if problems:
            raise LoweringError(tuple(problem.under(*self.place(stage)) for problem in problems))
