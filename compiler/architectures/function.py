"""Builds the functions of a model, which are graphs that other graphs can call, and adds calls of the functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.blocks.parts import Part
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_refs
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import Call, returned
from specc.compiler.programs.init import value_of
from specc.compiler.programs.tables import Tables


@dataclass
class Function:
    """A function under construction, and the arguments of its call.

    Attributes:
        outer: The builder of the caller.
        tables: The functions of the model.
        b: The builder of the function.
        args: The arguments, in the order of the inputs.
    """

    outer: Builder
    tables: Tables
    b: Builder = field(default_factory=lambda: Builder(""))
    args: list[str] = field(default_factory=list)

    def take(self, name: str, ref: str, type: TensorType | None = None) -> str:
        """Declares the input `name`, for which the caller passes `ref`. By default, the input has the type of the
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
        layer: int = 0,
    ) -> tuple[str, ...]:
        """Adds the call to the caller's program. Returns the results of the call.

        Args:
            node: The name of the call.
            names: Candidate names of the function, most preferred first.
            at: The path prefix of the function's parameters.
            outputs: The outputs of the function, by label.
            types: The types of the results. By default, the types of the outputs.
            labels: The names of the results in generated code.
            layer: The index of the calling block, for formulas that read `layer`.
        """
        body = self.tables.intern(self.b, names, at, outputs, layer)
        results = returned(types or [self.b.types[ref] for ref in outputs.values()])
        formulas = tuple(self.b.scalars.items())
        scalars = tuple((name, value_of(formula, layer=float(layer))) for name, formula in formulas)
        call = Call(body.name, at, results, scalars, tuple(labels), formulas)
        return output_refs(self.outer.add(node, call, self.args), len(results))


def begin_parts(
    b: Builder, parts: Sequence[tuple[Part, Shape]], context: LoweringContext, names: Sequence[str], at: str, name: str
) -> dict[str, str]:
    """Adds the call of a function that computes the initial state of parts, which is their state before the first
    token. Returns this state by part and key.

    Args:
        b: The builder of the program.
        parts: The parts, each with its sizes.
        context: The values that the parts can read.
        names: Candidate names of the function, most preferred first.
        at: The path prefix of the function's parameters.
        name: The prefix of the call's name.
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
    return {key.removeprefix(prefix): ref for key, ref in values.items() if key.startswith(prefix)}
