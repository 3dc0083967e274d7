"""A loop over time: all stages from a stage that attends with the state of a later stage up to that later stage. One
function computes one step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.blocks.context import FunctionTable, LoweringContext, Shape
from specc.compiler.blocks.parts import Part
from specc.compiler.ir.graph import Builder, Graph, TensorType, TypeRuleError, output_ref
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.region import STEP, TRAIN_STEP, Call, Scan, returned
from specc.compiler.programs.programs import LoweringError
from specc.compiler.strict import Path, Problem

ContextOf = Callable[[Part], LoweringContext]


def spans(stages: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Yields the indices of the first and last stage of each loop over time.

    A loop starts at a stage that attends with the state of a later stage. It ends at that stage, or at the last stage
    whose state is attended with from inside the loop.
    """
    titles = [stage.title for stage in stages]
    done = -1
    for first, stage in enumerate(stages):
        if first <= done or stage.query_stage not in titles[first:]:
            continue
        done = i = first
        while i <= done:
            asked = stages[i].query_stage
            if asked in titles[i:]:
                done = max(done, titles.index(asked, i))
            i += 1
        yield first, done


def step_name(number: int) -> str:
    """Returns the name of the loop `number` of a side, counted from 0."""
    return STEP if number == 0 else f"{STEP}{number + 1}"


def mismatch(error: TypeRuleError, *place: str | int) -> Problem:
    """Returns the problem for a type error in a stage, with the stage's spec path `place`."""
    hint = "make the widths equal; a stage reads the output of the stage before it"
    return Problem(place, "S301", error.message, hint)


@dataclass(frozen=True)
class Looped:
    """The outputs of a loop over time.

    Attributes:
        values: the values that later stages can read, by stage. The last stage's value comes last.
        state: the new state of every recurrent stage, by stage and key.
    """

    values: Mapping[str, str]
    state: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Span:
    """A loop over time over consecutive stages of a side.

    Attributes:
        stages: the stages, in order.
        side: the name of the side.
        number: the index of the loop on its side, from 0.
        shape: the shape dims of the model.
        functions: the table that interns the functions.
        widths: receives the number of input features of each stage, by title.
        place: the spec path of the first stage.
        before: the title of the stage before the loop; empty if there is none.
        read: the titles of the stages, other than the last, whose values later stages read.
    """

    stages: Sequence[Part]
    side: str
    number: int
    shape: Shape
    functions: FunctionTable
    widths: dict[str, int]
    place: Path
    before: str = ""
    read: Sequence[str] = field(default=())

    @property
    def name(self) -> str:
        return step_name(self.number)

    @property
    def at(self) -> str:
        return f"{self.side}.{self.name}"

    def run(
        self, b: Builder, x: str, given: Mapping[str, str], context_of: ContextOf, cache: Mapping[str, str]
    ) -> Looped:
        """Adds the loop over x [B, T, D], or one step if the context extends a sequence.

        Args:
            b: the builder of the program.
            x: the input of the first stage, [B, T, D].
            given: the values of earlier stages that stages of the loop read, by title.
            context_of: returns the lowering context of a stage.
            cache: the previous state, by stage and key, if the context extends a sequence.

        Returns:
            The values and the new state of the stages.

        Raises:
            LoweringError: if a stage does not fit the number of features of its input.
        """
        context = context_of(self.stages[-1])
        besides = {title: ref for title, ref in given.items() if title != self.before}
        step = self._step(b, x, besides, context)
        state = cache if context.extends else self.begin(b, context_of)
        carried = {self._key(stage, key): (stage, key) for stage in self._recurrent for key in self._state_of(stage)}
        fixed = [
            state[self._key(stage, key)]
            for stage in self.stages
            if not stage.recurrent
            for key in self._state_of(stage)
        ]
        args = (
            *(state[key] for key in carried),
            x,
            *besides.values(),
            *([context.seen] if context.seen else []),
            *fixed,
        )
        steps = b.types[x].shape[1]
        types = [step.types[ref] for _, ref in step.outputs]
        types[len(carried) :] = [type.with_shape(type.shape[0], steps, type.width) for type in types[len(carried) :]]
        labels = (
            *(self._label(*carry) for carry in carried.values()),
            *(label for label, _ in step.outputs[len(carried) :]),
        )
        b.scope = self.side
        op: Call | Scan = Call(step.name, self.at, returned(types), labels=labels)
        if not context.extends:
            op = Scan(step.name, self.at, len(carried), 1 + len(besides), returned(types), labels)
        node = b.add(self.name, op, args)
        refs = [output_ref(node, j) for j in range(len(types))]
        states: dict[str, dict[str, str]] = {stage.title: {} for stage in self._recurrent}
        for (stage, key), ref in zip(carried.values(), refs, strict=False):
            states[stage.title][key] = ref
        return Looped(dict(zip((*self.read, self.stages[-1].title), refs[len(carried) :], strict=True)), states)

    def begin(self, b: Builder, context_of: ContextOf) -> dict[str, str]:
        """Adds the state before the first step and returns it by stage and key."""
        context = context_of(self.stages[-1])
        inner = Builder("")
        memory = inner.input("memory", b.types[context.memory])
        state: dict[str, str] = {}
        initial: dict[str, str] = {}
        for stage in self.stages:
            if stage.recurrent:
                b.scope = f"{self.side}.{stage.title}"
                begun = stage.begin(b, self._shape_of(stage), context_of(stage))
                state |= {self._key(stage, key): ref for key, ref in begun.items()}
            else:
                inner.scope = stage.title
                begun = stage.begin(inner, self._shape_of(stage), replace(context, memory=memory, start={}))
                initial |= {self._key(stage, key): begun[key] for key in self._state_of(stage)}
        names = {key: key.removeprefix(f"{self.side}.").replace(".", "_") for key in initial}
        passed = {key for key, ref in initial.items() if ref == memory}
        outputs = {names[key]: ref for key, ref in initial.items() if key not in passed}
        body = self.functions.intern(inner, (f"{self.side}_{self.name}.begin",), self.at, outputs)
        types = [inner.types[ref] for ref in outputs.values()]
        b.scope = self.side
        labels = tuple(outputs) if len(outputs) > 1 else ()
        name = f"{self.name}.{next(iter(outputs))}" if len(outputs) == 1 else f"{self.name}.begin"
        node = b.add(name, Call(body.name, self.at, returned(types), labels=labels), (context.memory,))
        state |= dict.fromkeys(passed, context.memory)
        keys = [key for key in initial if key not in passed]
        return state | {key: output_ref(node, j) for j, key in enumerate(keys)}

    def _step(self, outer: Builder, x: str, besides: Mapping[str, str], context: LoweringContext) -> Graph:
        """Returns the function of one step. The state of all recurrent stages comes first in its inputs and its
        outputs.

        Names cannot collide with any titles of stages: fixed names have no `_`. The name of a stage's value is its
        title, `_` and a suffix without `_`. Only state has a key as its suffix.
        """
        b = Builder("")
        states = {
            stage.title: {key: b.input(self._label(stage, key), type) for key, type in self._state_of(stage).items()}
            for stage in self._recurrent
        }
        value = b.input("x", _one_step(outer.types[x]))
        values = {self.before: value} if self.before else {}
        values |= {title: b.input(f"{title}_y", _one_step(outer.types[ref])) for title, ref in besides.items()}
        seen = b.input("seen", outer.types[context.seen]) if context.seen else ""
        inside = replace(context, memory="", seen=seen, values=values, extends=True)
        outputs: dict[str, str] = {}
        for i, stage in enumerate(self.stages):
            width = b.types[value].width
            assert isinstance(width, int)
            self.widths[stage.title] = width
            *side, first = self.place
            assert isinstance(first, int)
            if problems := tuple(p.under(*side, first + i) for p in stage.problems_in(width)):
                raise LoweringError(problems)
            cache = states.get(stage.title) or {
                key: b.input(self._label(stage, key), type) for key, type in self._state_of(stage).items()
            }
            b.scope = stage.title
            asked = states[stage.query_stage] if stage.query_stage is not None else {}
            try:
                lowered = stage.lower(b, value, self._shape_of(stage), replace(inside, cache=cache, start=asked))
                value = values[stage.title] = stage.dropped(b, lowered.value, inside)
            except TypeRuleError as error:
                raise LoweringError((mismatch(error, *side, first + i),)) from None
            if stage.recurrent:
                outputs |= {self._next(stage, key): lowered.state[key] for key in self._state_of(stage)}
        outputs |= {f"{title}_y": values[title] for title in self.read}
        outputs["y"] = value
        drops = any(isinstance(node.op, Dropout) for node in b.nodes)  # only in training
        method = TRAIN_STEP if drops else STEP
        return self.functions.intern(b, (f"{self.side}_{self.name}.{method}",), self.at, outputs)

    @property
    def _recurrent(self) -> Sequence[Part]:
        return [stage for stage in self.stages if stage.recurrent]

    def _state_of(self, stage: Part) -> Mapping[str, TensorType]:
        return stage.state(self._shape_of(stage))

    def _key(self, stage: Part, key: str) -> str:
        """Returns the name of a state in a program."""
        return f"{self.side}.{stage.title}.{key}"

    def _label(self, stage: Part, key: str) -> str:
        """Returns the name of a state in a step: its key alone if only this stage is recurrent."""
        return key if stage.recurrent and len(self._recurrent) == 1 else f"{stage.title}_{key}"

    def _next(self, stage: Part, key: str) -> str:
        """Returns the name of a new state in a step."""
        label = self._label(stage, key)
        return f"next_{label}" if label == key else f"{label}_next"

    def _shape_of(self, stage: Part) -> Shape:
        return self.shape.of_width(self.widths.get(stage.title, 0))


def _one_step(type: TensorType) -> TensorType:
    """Returns the type of one step of a sequence [B, T, D]."""
    return type.with_shape(type.shape[0], 1, *type.shape[2:])
