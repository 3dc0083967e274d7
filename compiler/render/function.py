"""A Python function as text: what merged graphs become in model.py."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specc.compiler.expr.python_lines import fitted, operand
from specc.compiler.ir.graph import Graph, Named, Node, TensorType, spelled
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.passes.merge import NONE
from specc.compiler.passes.outline import Section
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Group, class_name, group_functions
from specc.compiler.render.body import BODY

WIDTH = 116  # columns of a line of a class body
LOCALS = frozenset({"F", "Tensor", "nn", "torch", "math", "weights", "self", "kept", "block", "outputs", "i", "layer"})
LOCALS |= {"earlier", "state", "cache", "name", "shape"}


@dataclass(frozen=True, slots=True)
class Function:
    """A Python function: `arguments` with annotations, the body's lines, what it returns and as what."""

    name: str
    doc: str
    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    returns: str
    annotation: str
    decorator: str = ""

    @property
    def head(self) -> tuple[str, ...]:
        """The lines up to the docstring's end."""
        line = f"def {self.name}({', '.join(self.arguments)}) -> {self.annotation}:"
        lines = [line]
        if len(line) > WIDTH:
            inside = ", ".join(self.arguments)
            short = len(inside) + 4 <= WIDTH
            lines = [
                f"def {self.name}(",
                *([f"    {inside}"] if short else [f"    {argument}," for argument in self.arguments]),
                f") -> {self.annotation}:",
            ]
        above = (self.decorator,) if self.decorator else ()
        return (*above, *lines, *(f"    {text}" for text in docstring(self.doc)))

    @property
    def code(self) -> tuple[str, ...]:
        """The lines of the body, none too long."""
        return tuple(text for line in self.lines for text in fitted(line, BODY))

    @property
    def ending(self) -> tuple[str, ...]:
        """The lines of the return."""
        return fitted(f"return {self.returns}", BODY)


def docstring(text: str) -> list[str]:
    """The lines of a docstring, wrapped."""
    if not text:
        return []
    if len(text) + 10 <= WIDTH:
        return [f'"""{text}"""']
    return textwrap.wrap(f'"""{text}"""', WIDTH - 4, break_long_words=False)


def types_doc(inputs: Iterable[Named], outputs: Sequence[TensorType]) -> str:
    """A line that states what goes in and what comes out; inputs of one type stand together."""
    by_type: dict[str, list[str]] = {}
    for name, type in inputs:
        by_type.setdefault(typed(type), []).append(name)
    given = ", ".join(f"{', '.join(names)} {type}" for type, names in by_type.items())
    return f"{given} -> {', '.join(map(typed, outputs))}."


def typed(type: TensorType) -> str:
    """A type with the names that sizes have in code."""
    return f"{type.dtype}[{', '.join(map(spelled, type.shape))}]"


def applied(group: Group, name: str, args: Sequence[str]) -> str:
    """A group over `args`: one that takes rows is given them as one dim, however many they are in."""
    first, flat = "", list(args)
    if group.takes_rows:
        for i, (_, type) in enumerate(group.forward.inputs):
            leading = sum(isinstance(dim, str) for dim in type.shape)
            if leading > 1 and isinstance(type.shape[0], str):
                dims = f"0, {leading - len(type.shape) - 1}" if len(type.shape) > leading else ""
                first, flat[i] = first or args[i], f"{operand(args[i])}.flatten({dims})"
    text = f"{class_name(name)}.apply({', '.join(flat)})"
    result = group.forward.types[group.forward.outputs[0][1]]
    return f"{text}.unflatten(0, {operand(first)}.shape[:-1])" if first and result.shape else text


@dataclass(frozen=True)
class Speller:
    """The text of nodes that are no plain ops: kernels chosen by the plan, fused groups, loops over time, calls.

    Attributes:
        plan: the plan.
        flags: for each program, what is true of it, such as `training`.
        sections: the flags that each method asks for.
        keeps: what programs call their state.
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
            return f"self.{node.op.at}.{node.op.callee.partition('.')[2]}({', '.join(args)})"
        if isinstance(node.op, Section):
            return self._section(graph, node.op, args)
        kernel = self.kernel(graph, node)
        return f"{kernel}({', '.join(args)})" if kernel else None

    def _section(self, graph: Graph, op: Section, args: Sequence[str]) -> str:
        """A call of a method that programs share."""
        pairs = list(zip(op.names, args, strict=True))
        given = [text for name, text in pairs if name not in op.optional]
        given += [f"{name}={text}" for name, text in pairs if name in op.optional and text != NONE]
        given += [f"{self.keeper}={self.keeper}"] if op.keeps else []
        given += [f"{flag}=True" for flag in self.sections[op.method] if flag in self.flags[graph.name]]
        return f"self.{op.method}({', '.join(given)})"

    def kernel(self, graph: Graph, node: Node) -> str:
        """The function of a node's kernel; empty where Torch runs it as it is written. A node of a group that nothing
        is learned through stands in the program itself."""
        homes = [graph]
        for group in self.plan.programs.groups:
            own = group.forward.by_name.get(node.name)
            if own is not None and own.op == node.op and not group.backward.outputs:
                homes.append(group.forward)
        choices = (choice for home in homes if (choice := self.plan.choice(home, node)) is not None)
        choice = next(choices, None)
        return self.plan.called(choice) if choice is not None and choice.rendered.function else ""
