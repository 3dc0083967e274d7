"""Functions of a model, and the calls to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.blocks.parts import Part
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_refs
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import Call, returned
from specc.compiler.programs.tables import Tables


@dataclass
class Function:
    """A function under construction, and the arguments of the call to it.

    Attributes:
        outer: the builder of the caller.
        tables: the functions of the model.
        b: the builder of the function.
        args: the arguments, in the order of the inputs.
    """

    outer: Builder
    tables: Tables
    b: Builder = field(default_factory=lambda: Builder(""))
    args: list[str] = field(default_factory=list)

    def take(self, name: str, ref: str, type: TensorType | None = None) -> str:
        """Declares the input `name`, whose argument is `ref`. If no type is given, the input has the type of the
        argument."""
        self.args.append(ref)
        return self.b.input(name, type or self.outer.types[ref])

    def call(
        self,
        node: str,
        names: Sequence[str],
        at: str,
        outputs: Mapping[str, str],
        types: Sequence[TensorType] = (),
        labels: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """Adds the call to the program of the caller and returns its results.

        Args:
            node: the name of the call.
            names: the candidate names of the function.
            at: the path prefix of the parameters of the function.
            outputs: the outputs of the function, by label.
            types: the types of the results; by default, the types of the outputs.
            labels: the names of the results in generated code.
        """
        body = self.tables.intern(self.b, names, at, outputs)
        results = returned(types or [self.b.types[ref] for ref in outputs.values()])
        scalars, formulas = (tuple((name, pair[i]) for name, pair in self.b.scalars.items()) for i in (0, 1))
        call = Call(body.name, at, results, scalars, tuple(labels), formulas)  # type: ignore[arg-type]
        return output_refs(self.outer.add(node, call, self.args), len(results))


def begin_parts(
    b: Builder,
    parts: Sequence[tuple[Part, Shape]],
    context: LoweringContext,
    names: Sequence[str],
    at: str,
    name: str,
) -> dict[str, str]:
    """Adds the call that computes the state of parts before the first token. Returns the state by part and key.

    Args:
        b: the builder of the program.
        parts: the parts, each with its sizes.
        context: the values that the parts can read.
        names: the candidate names of the function.
        at: the path prefix of the parameters of the function.
        name: the prefix of the name of the call.
    """
    if not parts:
        return {}
    function = Function(b, parts[0][1].tables)
    inner, state = function.b, dict[str, str]()
    memory = function.take("memory", context.memory)
    for part, shape in parts:
        inner.scope = part.title
        begun = part.begin(inner, shape, replace(context, memory=memory, initial={}))
        state |= {f"{part.title}.{key}": begun[key] for key in part.state(shape)}
    computed = {key: ref for key, ref in state.items() if ref != memory}
    state = dict.fromkeys(state, context.memory)
    if computed:
        outputs = {key.replace(".", "_"): ref for key, ref in computed.items()}
        state |= zip(computed, function.call(name, names, at, outputs, labels=tuple(outputs)), strict=True)
    return state


def below(prefix: str, values: Mapping[str, str]) -> dict[str, str]:
    """Returns the values whose names begin with `prefix`. The returned names omit the prefix."""
    return {key.removeprefix(prefix): ref for key, ref in values.items() if key.startswith(prefix)}
