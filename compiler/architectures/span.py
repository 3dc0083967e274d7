"""A loop over time: stages of which the first asks with the state of the last. One function is a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specc.compiler.blocks.roles import FunctionTable, Lowered, Part, Shape, Surroundings
from specc.compiler.ir import Builder, Graph, TensorType, output_ref
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.region import STEP, TRAIN_STEP, Call, Scan, returned
from specc.compiler.programs import LoweringError


@dataclass(frozen=True)
class Span:
    """Consecutive stages of the side `side`. Their parameters stand under `side`.step, and `widths` learns the features
    that each is given; `first` is where the first stands in the spec."""

    stages: Sequence[Part]
    side: str
    shape: Shape
    functions: FunctionTable
    widths: dict[str, int]
    first: int = 0

    @property
    def at(self) -> str:
        return f"{self.side}.step"

    def run(
        self, b: Builder, x: str, given: Mapping[str, str], around: Surroundings, cache: Mapping[str, str]
    ) -> Lowered:
        """Adds the loop over x [B, T, D], or one step where it `extends`; `given` are the values that stages read
        besides, by title. The state before is in `cache` where it extends, by stage and key. Returns the last stage's
        value and its new state."""
        besides = {title: ref for title, ref in given.items() if ref != x}
        step, carried = self._step(b, x, given, around)
        state = cache if around.extends else self.begin(b, around)
        kept = {
            f"{self.side}.{stage.title}.{key}": type
            for stage in self.stages
            for key, type in stage.state(self._shape_of(stage)).items()
        }
        fixed = [state[key] for key in kept if key not in carried]
        args = (*(state[key] for key in carried), x, *besides.values(), *([around.seen] if around.seen else []), *fixed)
        steps = b.types[x].shape[1]
        types = [step.types[ref] for _, ref in step.outputs]
        types[-1] = types[-1].with_shape(types[-1].shape[0], steps, types[-1].width)
        labels = (*(key.rpartition(".")[2] for key in carried), "y")
        b.scope = self.side
        op: Call | Scan = Call(step.name, self.at, returned(types), labels=labels)
        if not around.extends:
            op = Scan(step.name, self.at, len(carried), 1 + len(besides), returned(types), labels)
        node = b.add("step", op, args)
        refs = [output_ref(node, j) for j in range(len(types))]
        return Lowered(refs[-1], {key.rpartition(".")[2]: ref for key, ref in zip(carried, refs, strict=False)})

    def begin(self, b: Builder, around: Surroundings) -> dict[str, str]:
        """Adds what makes the state before the first step; returns it by stage and key."""
        inner = Builder("")
        memory = inner.input("memory", b.types[around.memory])
        state: dict[str, str] = {}
        made: dict[str, str] = {}
        for stage in self.stages:
            prefix = f"{self.side}.{stage.title}"
            if stage.recurrent:
                b.scope = prefix
                begun = stage.begin(b, self._shape_of(stage), around)
                state |= {f"{prefix}.{key}": ref for key, ref in begun.items()}
            else:
                inner.scope = stage.title
                begun = stage.begin(inner, self._shape_of(stage), replace(around, memory=memory, start={}))
                made |= {f"{prefix}.{key}": begun[key] for key in stage.state(self._shape_of(stage))}
        names = {key: key.removeprefix(f"{self.side}.").replace(".", "_") for key in made}
        passed = {key for key, ref in made.items() if ref == memory}
        outputs = {names[key]: ref for key, ref in made.items() if key not in passed}
        body = self.functions.keep(inner, (f"{self.side}_step.begin",), self.at, outputs)
        types = [inner.types[ref] for ref in outputs.values()]
        b.scope = self.side
        labels = tuple(outputs) if len(outputs) > 1 else ()
        name = f"step.{next(iter(outputs))}" if len(outputs) == 1 else "step.begin"
        node = b.add(name, Call(body.name, self.at, returned(types), labels=labels), (around.memory,))
        state |= dict.fromkeys(passed, around.memory)
        keys = [key for key in made if key not in passed]
        return state | {key: output_ref(node, j) for j, key in enumerate(keys)}

    def _step(
        self, outer: Builder, x: str, given: Mapping[str, str], around: Surroundings
    ) -> tuple[Graph, tuple[str, ...]]:
        """The function of one step, and which of the state it gives back: that comes first among its inputs."""
        b = Builder("")
        last = self.stages[-1]
        first = {key: b.input(key, kept) for key, kept in last.state(self._shape_of(last)).items()}
        value = b.input("x", _one_step(outer.types[x]))
        values = {
            title: value if ref == x else b.input(title, _one_step(outer.types[ref])) for title, ref in given.items()
        }
        seen = b.input("seen", outer.types[around.seen]) if around.seen else ""
        inside = replace(around, memory="", seen=seen, values=values, extends=True)
        for i, stage in enumerate(self.stages):
            width = b.types[value].width
            assert isinstance(width, int)
            self.widths[stage.title] = width
            if problems := tuple(p.under(self.first + i) for p in stage.problems_in(width)):
                raise LoweringError(problems)
            cache = dict(first)
            if stage is not last:
                kept = stage.state(self._shape_of(stage)).items()
                cache = {key: b.input(f"{stage.title}_{key}", type) for key, type in kept}
            b.scope = stage.title
            lowered = stage.lower(b, value, self._shape_of(stage), replace(inside, cache=cache, start=first))
            value = values[stage.title] = stage.dropped(b, lowered.value, inside)
        outputs = {**{f"next_{key}": ref for key, ref in lowered.state.items()}, "y": value}
        drops = any(isinstance(node.op, Dropout) for node in b.nodes)  # as no step of a line that is written does
        method = TRAIN_STEP if drops else STEP
        graph = self.functions.keep(b, (f"{self.side}_step.{method}",), self.at, outputs)
        return graph, tuple(f"{self.side}.{last.title}.{key}" for key in lowered.state)

    def _shape_of(self, stage: Part) -> Shape:
        return self.shape.of_width(self.widths.get(stage.title, 0))


def _one_step(type: TensorType) -> TensorType:
    """The type of one step of a sequence [B, T, D]."""
    return type.with_shape(type.shape[0], 1, *type.shape[2:])
