"""Python functions as text, rendered from merged graphs for model.py."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from specc.compiler.expr.python_lines import BODY, INSIDE, fitted, listed, operand
from specc.compiler.ir.graph import Graph, Named, Node
from specc.compiler.ir.types import TensorType, spelled
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.passes.merge import NONE, Merged, Where
from specc.compiler.passes.outline import Section
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Group, class_name, group_functions
from specc.compiler.records import record
from specc.compiler.render.body import Body

LOCALS = frozenset({"F", "Tensor", "nn", "torch", "math", "weights", "self", "kept", "block", "outputs", "i", "layer"})
LOCALS |= {"earlier", "state", "cache", "name", "shape"}


@record
class Function:
    """A Python function as text.

    `arguments` include annotations. `lines` are the body without the return. `returns` is the returned expression, and
    `annotation` the type of this expression.
    """

    name: str
    doc: str
    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    returns: str
    annotation: str
    decorator: str = ""

    @property
    def head(self) -> tuple[str, ...]:
        inside = ", ".join(self.arguments)
        lines = [f"def {self.name}({inside}) -> {self.annotation}:"]
        if len(lines[0]) > INSIDE:
            arguments = [inside] if len(inside) + 4 <= INSIDE else listed(self.arguments, INSIDE - 4)
            lines = [f"def {self.name}(", *(f"    {text}" for text in arguments), f") -> {self.annotation}:"]
        above = (self.decorator,) if self.decorator else ()
        return (*above, *lines, *(f"    {text}" for text in docstring(self.doc)))

    @property
    def code(self) -> tuple[str, ...]:
        return tuple(text for line in self.lines for text in fitted(line, BODY))

    @property
    def ending(self) -> tuple[str, ...]:
        return fitted(f"return {self.returns}", BODY)


def method(body: Body, name: str, doc: str, arguments: Iterable[str], annotation: str = "") -> Function:
    """Returns a rendered body as a method.

    Args:
        body: The body, after all of its lines are written.
        name: The name of the method.
        doc: The docstring of the method.
        arguments: The arguments other than `self`, with annotations.
        annotation: The type annotation of the result. By default, the annotation of the returned tensors.
    """
    annotation = annotation or tensors(len(body.merged.outputs))
    return Function(name, doc, ("self", *arguments), body.lines, body.returned(), annotation)


def tensors(count: int) -> str:
    return "Tensor" if count == 1 else "tuple[Tensor, Tensor]" if count == 2 else "tuple[Tensor, ...]"


def tuple_text(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})"


def optional_arguments(
    merged: Merged, inputs: Sequence[tuple[str, TensorType, Where]], flags: Sequence[str], state: Sequence[str]
) -> Sequence[str]:
    """Returns the argument list of a method, as text. Inputs of only some variants are optional. The method's
    docstring states the types and shapes of inputs.

    Args:
        merged: The variants of the method.
        inputs: The name and type of each input that is not state, and the variants with this input.
        flags: The names of boolean arguments.
        state: The text of the argument for state, if there is one.
    """
    names = (name if where == merged.every else f"{name}=None" for name, _, where in inputs)
    return [*names, *state, *(f"{flag}=False" for flag in flags)]


def docstring(text: str) -> list[str]:
    if not text:
        return []
    if len(text) + 10 <= INSIDE:
        return [f'"""{text}"""']
    return textwrap.wrap(f'"""{text}"""', INSIDE - 4, break_long_words=False)


def types_doc(inputs: Iterable[Named], outputs: Sequence[TensorType]) -> str:
    by_type: dict[str, list[str]] = {}
    for name, type in inputs:
        by_type.setdefault(typed(type), []).append(name)
    types = ", ".join(f"{', '.join(names)} {type}" for type, names in by_type.items())
    return f"{types} -> {', '.join(map(typed, outputs))}."


def typed(type: TensorType) -> str:
    return f"{type.dtype}[{', '.join(map(spelled, type.shape))}]"


def applied(group: Group, name: str, args: Sequence[str]) -> str:
    """Returns the text that calls a group's function with `args`.

    If `group.takes_rows` is true, the call flattens the leading dims of an argument, and unflattens the result.
    """
    first: tuple[str, TensorType] | None = None
    flat = list(args)
    if group.takes_rows:
        for i, (_, type) in enumerate(group.forward.inputs):
            leading = sum(isinstance(dim, str) for dim in type.shape)
            if leading > 1 and isinstance(type.shape[0], str):
                dims = f"0, {leading - len(type.shape) - 1}" if len(type.shape) > leading else ""
                first = first or (args[i], type)
                flat[i] = f"{operand(args[i])}.flatten({dims})"
    text = f"{class_name(name)}.apply({', '.join(flat)})"
    result = group.forward.types[group.forward.outputs[0][1]]
    if first is None or not result.shape:
        return text
    given, type = first
    same = result.shape == type.shape
    return f"{text}.view_as({given})" if same else f"{text}.unflatten(0, {operand(given)}.shape[:-1])"


@record
class Speller:
    """Renders nodes that are not plain ops: kernels of the plan, fused groups, loops over time and calls.

    Attributes:
        plan: The plan.
        flags: The flags that are true in each program, such as `training`.
        sections: The names of flag arguments, for each method that several programs call.
        keeper: The name of the programs' argument for the state.
    """

    plan: Plan
    flags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    keeper: str = ""

    def __call__(self, graph: Graph, node: Node, args: Sequence[str]) -> str | None:
        if isinstance(node.op, Fused):
            group = self.plan.programs.group(node.op.group)
            name = group_functions(self.plan.programs)[group.name]
            return applied(group, name, args)
        if isinstance(node.op, Scan):
            which = ["training=True"] if node.op.drops else []
            return f"self.{node.op.at}({', '.join((*args, *which))})"
        if isinstance(node.op, Call):
            place = f"self.{node.op.at}" if node.op.at else "self"
            return f"{place}.{node.op.callee.partition('.')[2]}({', '.join(args)})"
        if isinstance(node.op, Section):
            return self._section(graph, node.op, args)
        kernel = self.kernel(graph, node)
        return f"{kernel}({', '.join(args)})" if kernel else None

    def _section(self, graph: Graph, op: Section, args: Sequence[str]) -> str:
        pairs = list(zip(op.names, args, strict=True))
        arguments = [text for name, text in pairs if name not in op.optional]
        arguments += [f"{name}={text}" for name, text in pairs if name in op.optional and text != NONE]
        arguments += [f"{self.keeper}={self.keeper}"] if op.keeps else []
        arguments += [f"{flag}=True" for flag in self.sections[op.method] if flag in self.flags[graph.name]]
        return f"self.{op.method}({', '.join(arguments)})"

    def kernel(self, graph: Graph, node: Node) -> str:
        """Returns the name of a node's kernel function. The result is empty if the plan has no kernel for the node.

        The nodes of a group without a backward pass are rendered in the program that runs the group. The plan lists the
        kernels of these nodes under the group.
        """
        homes = [graph]
        for group in self.plan.programs.groups:
            member = group.forward.by_name.get(node.name)
            if member is not None and member.op == node.op and group.inlined:
                homes.append(group.forward)
        choice = next((choice for home in homes if (choice := self.plan.choice(home, node)) is not None), None)
        return self.plan.called(choice) if choice is not None and choice.rendered.function else ""
