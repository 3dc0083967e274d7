"""A Python function as text: what a graph becomes in model.py."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.expr.python_lines import fitted
from specc.compiler.ir.graph import Graph, Named, Node, TensorType
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.plan.plan import Plan

BODY = 102  # columns of a line of a method's body
WIDTH = 104  # columns of a line of a class body
LOCALS = frozenset({"F", "Tensor", "nn", "torch", "weights", "self", "kept", "block", "outputs", "own", "i", "read"})
LOCALS |= {"more", "layer", "earlier", "state"}


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
            lines = [
                f"def {self.name}(",
                *(f"    {argument}," for argument in self.arguments),
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
    if len(text) + 8 <= WIDTH:
        return [f'"""{text}"""']
    return [*textwrap.wrap(f'"""{text}', WIDTH - 4, break_long_words=False), '"""']


def types_doc(inputs: Sequence[Named], outputs: Sequence[TensorType]) -> str:
    """A line that states what goes in and what comes out."""
    given = ", ".join(f"{name} {type}" for name, type in inputs)
    return f"{given} -> {', '.join(map(str, outputs))}."


def class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


@dataclass(frozen=True)
class Speller:
    """The text of nodes that are no plain ops: kernels chosen by the plan, fused groups, loops and calls alone."""

    plan: Plan
    graph: Graph

    def __call__(self, node: Node, args: Sequence[str]) -> str | None:
        if isinstance(node.op, Fused):
            return f"{node.op.group}({', '.join(args)})"
        if isinstance(node.op, Scan):
            which = ["training=True"] if node.op.drops else []
            return f"self.{node.op.at}({', '.join((*args, *which))})"
        if isinstance(node.op, Call):
            return f"self.{node.op.at}.{node.op.callee.partition('.')[2]}({', '.join(args)})"
        choice = self.plan.choice(self.graph, node)
        if choice is not None and choice.rendered.function:
            return f"{self.plan.called(choice)}({', '.join(args)})"
        return None
