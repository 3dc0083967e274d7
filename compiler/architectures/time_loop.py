"""A loop over time: stages that ask with the state of later ones, up to the last that is asked. One function is a
step."""

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
    """The first and last stage of each loop over time: from one that asks with a later state to that state's own, and
    on to all that are asked from within."""
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
    """What the loop `number` of a side is called there, counted from 0."""
    return STEP if number == 0 else f"{STEP}{number + 1}"


def mismatch(error: TypeRuleError, *place: str | int) -> Problem:
    """A type error in a stage, told with its place in the spec."""
    hint = "make the widths equal: each stage is given what the one before it makes"
    return Problem(place, "S301", error.message, hint)


@dataclass(frozen=True)
class Looped:
    """What a loop gives: the values that later stages may read, the last stage's at the end, and the new state of every
    recurrent stage by key; both by title."""

    values: Mapping[str, str]
    state: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Span:
    """Consecutive stages of the side `side`: its loop `number`, counted from 0. Their parameters stand under `at`, and
    `widths` learns the features that each is given; `place` is where the spec has the first one, behind the stage
    `before`. Later stages read the values of `read` besides the last one's."""

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
        """Adds the loop over x [B, T, D], or one step where it `extends`; `given` are the values that stages read
        besides, by title. The state before is in `cache` where it extends, by stage and key."""
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
            *(self._label(*one) for one in carried.values()),
            *(label for label, _ in step.outputs[len(carried) :]),
        )
        b.scope = self.side
        op: Call | Scan = Call(step.name, self.at, returned(types), labels=labels)
        if not context.extends:
            op = Scan(step.name, self.at, len(carried), 1 + len(besides), returned(types), labels)
        node = b.add(self.name, op, args)
        refs = [output_ref(node, j) for j in range(len(types))]
        kept: dict[str, dict[str, str]] = {stage.title: {} for stage in self._recurrent}
        for (stage, key), ref in zip(carried.values(), refs, strict=False):
            kept[stage.title][key] = ref
        return Looped(dict(zip((*self.read, self.stages[-1].title), refs[len(carried) :], strict=True)), kept)

    def begin(self, b: Builder, context_of: ContextOf) -> dict[str, str]:
        """Adds what makes the state before the first step; returns it by stage and key."""
        context = context_of(self.stages[-1])
        inner = Builder("")
        memory = inner.input("memory", b.types[context.memory])
        state: dict[str, str] = {}
        made: dict[str, str] = {}
        for stage in self.stages:
            if stage.recurrent:
                b.scope = f"{self.side}.{stage.title}"
                begun = stage.begin(b, self._shape_of(stage), context_of(stage))
                state |= {self._key(stage, key): ref for key, ref in begun.items()}
            else:
                inner.scope = stage.title
                begun = stage.begin(inner, self._shape_of(stage), replace(context, memory=memory, start={}))
                made |= {self._key(stage, key): begun[key] for key in self._state_of(stage)}
        names = {key: key.removeprefix(f"{self.side}.").replace(".", "_") for key in made}
        passed = {key for key, ref in made.items() if ref == memory}
        outputs = {names[key]: ref for key, ref in made.items() if key not in passed}
        body = self.functions.intern(inner, (f"{self.side}_{self.name}.begin",), self.at, outputs)
        types = [inner.types[ref] for ref in outputs.values()]
        b.scope = self.side
        labels = tuple(outputs) if len(outputs) > 1 else ()
        name = f"{self.name}.{next(iter(outputs))}" if len(outputs) == 1 else f"{self.name}.begin"
        node = b.add(name, Call(body.name, self.at, returned(types), labels=labels), (context.memory,))
        state |= dict.fromkeys(passed, context.memory)
        keys = [key for key in made if key not in passed]
        return state | {key: output_ref(node, j) for j, key in enumerate(keys)}

    def _step(self, outer: Builder, x: str, besides: Mapping[str, str], context: LoweringContext) -> Graph:
        """The function of one step. The state of all recurrent stages comes first among its inputs and its outputs.

        No two of its names are equal, whatever stages are called: words of its own have no `_`, and what belongs to a
        stage ends in `_` and a word without one, which is no key of a state but for state.
        """
        b = Builder("")
        states = {
            stage.title: {key: b.input(self._label(stage, key), kept) for key, kept in self._state_of(stage).items()}
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
                key: b.input(self._label(stage, key), kept) for key, kept in self._state_of(stage).items()
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
        drops = any(isinstance(node.op, Dropout) for node in b.nodes)  # as no step of a line that is written does
        method = TRAIN_STEP if drops else STEP
        return self.functions.intern(b, (f"{self.side}_{self.name}.{method}",), self.at, outputs)

    @property
    def _recurrent(self) -> Sequence[Part]:
        return [stage for stage in self.stages if stage.recurrent]

    def _state_of(self, stage: Part) -> Mapping[str, TensorType]:
        return stage.state(self._shape_of(stage))

    def _key(self, stage: Part, key: str) -> str:
        """What state is called in a program."""
        return f"{self.side}.{stage.title}.{key}"

    def _label(self, stage: Part, key: str) -> str:
        """What state is called in a step: by its key alone where no other stage is recurrent."""
        return key if stage.recurrent and len(self._recurrent) == 1 else f"{stage.title}_{key}"

    def _next(self, stage: Part, key: str) -> str:
        """What a step calls its new state."""
        label = self._label(stage, key)
        return f"next_{label}" if label == key else f"{label}_next"

    def _shape_of(self, stage: Part) -> Shape:
        return self.shape.of_width(self.widths.get(stage.title, 0))


def _one_step(type: TensorType) -> TensorType:
    """The type of one step of a sequence [B, T, D]."""
    return type.with_shape(type.shape[0], 1, *type.shape[2:])
