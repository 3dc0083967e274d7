"""A loop over time: the stages from one that attends with the state of a later stage up to that later stage. One
function computes one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specc.compiler.architectures.circuit import STREAM, Circuit
from specc.compiler.architectures.scope import Scope
from specc.compiler.architectures.stages import Stages
from specc.compiler.blocks.context import LoweringContext
from specc.compiler.blocks.parts import Part
from specc.compiler.blocks.wiring import IDS
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, output_refs
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.region import STEP, TRAIN_STEP, Call, Scan, returned


@dataclass(frozen=True)
class Loop:
    """A loop over time over consecutive stages of a side.

    Attributes:
        side: the stages of the side.
        name: the name of the loop.
        stages: the stages of the loop, in order.
    """

    side: Stages
    name: str
    stages: Sequence[Part]

    @property
    def at(self) -> str:
        return f"{self.side.name}.{self.name}"

    @property
    def _recurrent(self) -> Sequence[Part]:
        return [stage for stage in self.stages if "recurrent" in stage.traits]

    def add(self, scope: Scope, context: LoweringContext) -> dict[str, str]:
        """Adds the loop over whole sequences, or one step if the context extends a sequence.

        Args:
            scope: the values of the program. It receives those of the stages.
            context: the values that the stages can read, with the state of the side.

        Returns:
            The new state of the recurrent stages, by side, stage and key.

        Raises:
            LoweringError: if a stage does not fit the number of features of its input.
        """
        b, side, last = scope.b, self.side, self.stages[-1]
        first = list(side.stages).index(self.stages[0])
        before = side.stages[first - 1].title if first else ""
        titles = _reads(self.stages)
        besides = {f"{title}_y": scope.values[title] for title in titles if title in scope.values and title != before}
        besides |= {IDS: context.ids} if IDS in titles else {}
        later = _reads(side.stages[first + len(self.stages) :])
        read = tuple(stage.title for stage in self.stages[:-1] if stage.title in later)
        step = self._step(b, {"x": scope.value, **besides}, before, read, context)
        state = context.cache if context.extends else side.begin(b, context, [(self.name, self.stages)])
        carried = side.state(self._recurrent)
        fixed = [key for stage in self.stages if "recurrent" not in stage.traits for key in side.state([stage])]
        args = [
            *(state[key] for key in carried),
            scope.value,
            *besides.values(),
            *([context.seen] if context.seen else []),
            *(state[key] for key in fixed),
        ]
        steps = b.types[scope.value].shape[1]
        types = [step.types[ref] for _, ref in step.outputs]
        types[len(carried) :] = [type.with_shape(type.shape[0], steps, type.width) for type in types[len(carried) :]]
        labels = (*self._labels(self._recurrent), *(label for label, _ in step.outputs[len(carried) :]))
        op: Call | Scan = Call(step.name, self.at, returned(types), labels=labels)
        if not context.extends:
            op = Scan(step.name, self.at, len(carried), 1 + len(besides), returned(types), labels)
        scope.enter("")
        refs = output_refs(b.add(self.name, op, args), len(types))
        scope.values |= zip((*read, last.title), refs[len(carried) :], strict=True)
        scope.streams = {STREAM: refs[-1]}
        return dict(zip(carried, refs, strict=False))

    def _step(
        self, outer: Builder, sequences: Mapping[str, str], before: str, read: Sequence[str], context: LoweringContext
    ) -> Graph:
        """Returns the function of one step. The state of all recurrent stages comes first in the inputs and outputs.

        Input names cannot collide with any titles of stages: fixed names have no `_`. The name of the output of a stage
        is its title, `_` and a suffix without `_`. Only state has a key as its suffix.

        Args:
            outer: the builder of the program.
            sequences: the sequences that the step reads one position of, by input name: first the input of the loop.
            before: the title of the stage before the loop; empty if there is none.
            read: the titles of the stages whose values are read after the loop, without the last stage.
            context: the values that the stages can read.
        """
        b, side = Builder(""), self.side
        states = {stage.title: self._state(b, stage) for stage in self._recurrent}
        for name, ref in sequences.items():
            type = outer.types[ref]
            b.input(name, type.with_shape(type.shape[0], 1, *type.shape[2:]))
        seen = b.input("seen", outer.types[context.seen]) if context.seen else ""
        inside = replace(context, memory="", seen=seen, extends=True)
        scope = Scope(b, side.shape, {STREAM: "x"}, Circuit(layers=self.stages).learned)
        scope.values = {name.removesuffix("_y"): name for name in sequences if name not in ("x", IDS)}
        scope.values |= {before: "x"} if before else {}
        scope.shape_of = side.shape_of_learned
        outputs: dict[str, str] = {}
        for stage in self.stages:
            x = side.input(scope, stage, context)
            cache = states.get(stage.title) or self._state(b, stage)
            query = states[stage.query_stage] if stage.query_stage is not None else {}
            state = side.add(scope, stage, x, replace(inside, cache=cache, initial=query))
            if "recurrent" in stage.traits:
                form = "next_{}" if len(states) == 1 else "{}_next"
                outputs |= zip(map(form.format, self._labels([stage])), state.values(), strict=True)
        outputs |= {f"{title}_y": scope.values[title] for title in read}
        outputs["y"] = scope.value
        drops = any(isinstance(node.op, Dropout) for node in b.nodes)  # only in training
        method = TRAIN_STEP if drops else STEP
        return side.shape.tables.intern(b, (f"{side.name}_{self.name}.{method}",), self.at, outputs)

    def _state(self, b: Builder, stage: Part) -> dict[str, str]:
        """Declares the state of a stage as inputs, by key."""
        state = stage.state(self.side.shape_of(stage))
        return {key: b.input(label, state[key]) for label, key in zip(self._labels([stage]), state, strict=True)}

    def _labels(self, stages: Sequence[Part]) -> tuple[str, ...]:
        """Returns the names of the state of stages in a step: the keys alone if only one stage is recurrent."""
        return tuple(
            key if "recurrent" in stage.traits and len(self._recurrent) == 1 else f"{stage.title}_{key}"
            for stage in stages
            for key in stage.state(self.side.shape_of(stage))
        )


def _reads(stages: Sequence[Part]) -> tuple[str, ...]:
    """Returns the names of the values that stages read in addition to their inputs: titles of stages, and `ids`."""
    named = sorted(Circuit(layers=stages).reads - {STREAM, "h", "y"})
    return tuple(dict.fromkeys((*(stage.reads for stage in stages if stage.reads is not None), *named)))
