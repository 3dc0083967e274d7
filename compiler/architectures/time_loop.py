"""Lowers the stages of an encoder or a decoder over the tokens of a program.

A loop over time begins with a stage whose attention query is the state of a later stage, and ends with this later
stage. A function computes one step of the loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from specc.compiler.architectures.circuit import STREAM, Circuit
from specc.compiler.architectures.function import Function
from specc.compiler.architectures.scope import Scope
from specc.compiler.architectures.side import Side, groups
from specc.compiler.blocks.context import LoweringContext
from specc.compiler.blocks.parts import Part
from specc.compiler.blocks.wiring import IDS
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_refs
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.region import STEP, TRAIN_STEP, Call, Scan, returned
from specc.compiler.ops.sequence import StateWrite


def run(side: Side, b: Builder, context: LoweringContext) -> tuple[str, dict[str, str]]:
    """Adds all stages of an encoder or a decoder to a program.

    Args:
        side: the encoder or the decoder.
        b: the builder of the program.
        context: the values that the stages can read. If `context.extends` is true, `context.cache` is the previous
            state, by side, stage and key.

    Returns:
        The output of the last stage, and the state after the last token, by side, stage and key.

    Raises:
        LoweringError: if a stage cannot process the number of features of its input.
    """
    learned = Circuit(layers=side.stages).learned
    scope = Scope(b, side.shape, {STREAM: ""}, learned, common={IDS: context.ids}, at=side.name)
    scope.shape_of = side.shape_of_learned
    state: dict[str, str] = {}
    for loop, first, stages in groups(side.stages):
        if loop:
            new: Mapping[str, str] = Loop(side, loop, first, stages).add(scope, context)
        else:
            inside = side.inside(stages[0], context)
            new = side.add(scope, stages[0], side.input(scope, stages[0], inside), inside)
        b.scope = ""
        recurrent = side.state([stage for stage in stages if "recurrent" in stage.traits]) if context.extends else {}
        for key, ref in new.items():
            write = key in recurrent
            state[key] = b.add(f"{key}.state", StateWrite(), (context.cache[key], ref)) if write else ref
    return scope.value, state


class Loop(NamedTuple):
    """Consecutive stages that run in a loop over time.

    Attributes:
        side: the encoder or the decoder with the stages.
        name: the name of the loop.
        first: the index of the first stage.
        stages: the stages of the loop, in order.
    """

    side: Side
    name: str
    first: int
    stages: Sequence[Part]

    @property
    def _recurrent(self) -> Sequence[Part]:
        return [stage for stage in self.stages if "recurrent" in stage.traits]

    def add(self, scope: Scope, context: LoweringContext) -> dict[str, str]:
        """Adds the loop over whole sequences. If `context.extends` is true, adds a single step, which continues a
        sequence.

        Args:
            scope: The values that expressions of the program can read. This method adds the outputs of the stages to
                these values.
            context: The values that the stages can read, with the state of the encoder or the decoder.

        Returns:
            The new state of the recurrent stages, by side, stage and key.

        Raises:
            LoweringError: If a stage cannot process the number of features of its input.
        """
        b, side, last = scope.b, self.side, self.stages[-1]
        before = side.stages[self.first - 1].title if self.first else ""
        titles = _reads(self.stages)
        sequences = {"x": scope.value}
        sequences |= {f"{name}_y": scope.values[name] for name in titles if name in scope.values and name != before}
        sequences |= {IDS: context.ids} if IDS in titles else {}
        later = _reads(side.stages[self.first + len(self.stages) :])
        read = tuple(stage.title for stage in self.stages[:-1] if stage.title in later)
        step = Function(b, side.shape.tables)
        outputs = self._step(step, sequences, before, read, context)
        drops = any(isinstance(node.op, Dropout) for node in step.b.nodes)  # only in training
        names, at = (f"{side.name}_{self.name}.{TRAIN_STEP if drops else STEP}",), f"{side.name}.{self.name}"
        body = side.shape.tables.intern(step.b, names, at, outputs).name
        state = context.cache if context.extends else side.begin(b, context, self.name, self.stages)
        args = [state.get(arg, arg) for arg in step.args]
        carried, steps = side.state(self._recurrent), b.types[scope.value].shape[1]
        types = [step.b.types[ref] for ref in outputs.values()]
        types[len(carried) :] = [type.with_shape(type.shape[0], steps, type.width) for type in types[len(carried) :]]
        labels = (*self._labels(self._recurrent), *list(outputs)[len(carried) :])
        op: Call | Scan = Call(body, at, returned(types), labels=labels)
        if not context.extends:
            op = Scan(body, at, len(carried), len(sequences), returned(types), labels)
        scope.enter("")
        refs = output_refs(b.add(self.name, op, args), len(types))
        scope.values |= zip((*read, last.title), refs[len(carried) :], strict=True)
        scope.streams = {STREAM: refs[-1]}
        return dict(zip(carried, refs, strict=False))

    def _step(
        self, step: Function, sequences: Mapping[str, str], before: str, read: Sequence[str], context: LoweringContext
    ) -> Mapping[str, str]:
        """Adds the nodes of one step to the function `step`. Returns the outputs by name. The inputs and the outputs
        each begin with the state of all recurrent stages. For state, the arguments in `step.args` are only names, which
        the caller of this method replaces by values.

        Input names never collide. Fixed names contain no `_`. The output of a stage is named TITLE_SUFFIX, and the
        suffix contains no `_`. Only names of state end in a key, such as `h`.

        Args:
            step: The function.
            sequences: The sequences, by input name. The step reads one position of each. The first sequence is the
                input of the loop.
            before: The title of the stage before the loop, or "".
            read: The titles of the stages whose values are read after the loop, except the last stage.
            context: The values that the stages can read.
        """
        b, side = step.b, self.side
        states = {stage.title: self._state(step, stage) for stage in self._recurrent}
        for name, ref in sequences.items():
            type = step.outer.types[ref]
            step.take(name, ref, type.with_shape(type.shape[0], 1, *type.shape[2:]))
        seen = step.take("seen", context.seen) if context.seen else ""
        inside = replace(context, memory="", seen=seen, extends=True)
        scope = Scope(b, side.shape, {STREAM: "x"}, Circuit(layers=self.stages).learned)
        scope.values = {name.removesuffix("_y"): name for name in sequences if name not in ("x", IDS)}
        scope.values |= {before: "x"} if before else {}
        scope.shape_of = side.shape_of_learned
        outputs: dict[str, str] = {}
        for stage in self.stages:
            x = side.input(scope, stage, context)
            cache = states.get(stage.title) or self._state(step, stage)
            query = states[stage.query_stage] if stage.query_stage is not None else {}
            state = side.add(scope, stage, x, replace(inside, cache=cache, initial=query))
            if "recurrent" in stage.traits:
                form = "next_{}" if len(states) == 1 else "{}_next"
                outputs |= zip(map(form.format, self._labels([stage])), state.values(), strict=True)
        outputs |= {f"{title}_y": scope.values[title] for title in read}
        return {**outputs, "y": scope.value}

    def _state(self, step: Function, stage: Part) -> dict[str, str]:
        entries = zip(self._labels([stage]), self.side.state([stage]).items(), strict=True)
        return {name.rpartition(".")[2]: step.take(label, name, type) for label, (name, type) in entries}

    def _labels(self, stages: Sequence[Part]) -> tuple[str, ...]:
        """Returns the names of the stages' state in a step: TITLE_KEY, or KEY if the loop has a single recurrent
        stage."""
        return tuple(
            key if "recurrent" in stage.traits and len(self._recurrent) == 1 else f"{stage.title}_{key}"
            for stage in stages
            for key in stage.state(self.side.shape_of(stage))
        )


def _reads(stages: Sequence[Part]) -> tuple[str, ...]:
    named = sorted(Circuit(layers=stages).reads - {STREAM, "h", "y"})
    return tuple(dict.fromkeys((*(stage.reads for stage in stages if stage.reads is not None), *named)))
