"""Spells a graph as the body of a Python function: short names, one line a thought, no value computed twice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specc.compiler.expr import Expr, Var, reread
from specc.compiler.expr.values import children
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.pointwise import Pointwise

LINE = 100  # columns that a line may take, before its indent
Spell = Callable[[Node, Sequence[str]], str | None]


@dataclass
class Body:
    """The lines of one function under construction.

    `names` maps graph inputs to Python names; `spell` gives the text of nodes that are no plain ops (calls of kernels,
    groups, blocks), None for all others; `reserved` are names that locals must not take; `alive` are inputs that are
    read once more when the body has ended; `scopes` are first words of paths that names can do without; `apart` are
    values that must not be called x, as a loop over blocks calls its own so; `wanted` are names that some values have
    elsewhere.
    """

    graph: Graph
    names: Mapping[str, str]
    spell: Spell
    reserved: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    wanted: Mapping[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    position: int = 0
    ahead: bool = False

    def __post_init__(self) -> None:
        self.texts |= self.names
        self.held |= {name: ref for ref, name in self.names.items()}

    def run(self, nodes: Sequence[Node]) -> None:
        """Spells `nodes`, which follow those spelled before."""
        for node in nodes:
            self.position = self.graph.nodes.index(node)
            self.node(node)

    def node(self, node: Node) -> None:
        text = self.text_of(node)
        if node.op.in_place and not self.graph.consumers[node.name]:
            self.lines.append(text)  # what it changes is its result
            self.texts[node.name] = self.text(node.inputs[0])
            return
        if len(node.types) == 1 and self.may_wait(node):
            self.pending[node.name] = text
        else:
            self.assign(node, text)

    def text_of(self, node: Node) -> str:
        """The node's expression; pending values are first written out where they would make it long or run twice."""
        for ref in node.inputs:
            if ref in self.pending and self.read_twice(node, ref):
                self.write(ref)
        named = ", ".join(self.candidates(node, i)[0] for i in range(len(node.types)))
        room = LINE - len(f"{named} = ")
        while True:
            args = [self.text(ref) for ref in node.inputs]
            text = self.spell(node, args)
            if text is None:
                text = node.op.torch(args, [self.graph.types[ref] for ref in node.inputs])
            waiting = [ref for ref in node.inputs if ref in self.pending]
            if len(text) <= room or not waiting:
                break
            self.write(max(waiting, key=lambda ref: len(self.pending[ref])))
        for ref in node.inputs:
            self.pending.pop(ref, None)
        return text

    def read_twice(self, node: Node, ref: str) -> bool:
        """Whether the node's own text would repeat the value."""
        if not isinstance(node.op, Pointwise):
            return False
        variable = dict(zip(node.inputs, node.op.variables, strict=True))[ref]
        return sum(_count(reread(text), variable) for text in node.op.outputs) > 1

    def may_wait(self, node: Node) -> bool:
        """Whether the value can stand inside the line of its only reader, or of the return."""
        if not node.op.inline or self.graph.uses(node.name) != 1:
            return False
        readers = self.graph.consumers[node.name]
        return not readers or readers[0].op.inline or readers[0].inputs[0] == node.name

    def text(self, ref: str) -> str:
        """How to write a value here."""
        if ref in self.pending:
            return self.pending[ref]
        if ref[0] == "@" or ref[0] == "$":
            return self.texts.get(ref, f"self.{ref[1:]}")
        return self.texts[ref]

    def write(self, ref: str) -> None:
        """Gives a pending value a line of its own, ahead of the node at hand."""
        node = self.graph.by_name[node_of(ref)]
        before, self.ahead = self.ahead, True
        self.assign(node, self.pending.pop(ref))
        self.ahead = before

    def release(self, *names: str) -> None:
        """Writes out what waits and reads one of `names`, which are about to get other values."""
        for waiting in [
            ref for ref, other in self.pending.items() if any(self.mentions(other, name) for name in names)
        ]:
            self.write(waiting)

    def assign(self, node: Node, text: str) -> None:
        names = [self.name_for(node, i) for i in range(len(node.types))]
        self.release(*names)
        self.lines.append(f"{', '.join(names)} = {text}")
        for ref, name in zip(node.outputs, names, strict=True):
            self.texts[ref], self.held[name] = name, ref

    @staticmethod
    def mentions(text: str, name: str) -> bool:
        words = "".join(c if c.isalnum() or c in "_." else " " for c in text).split()
        return any(word.partition(".")[0] == name for word in words)

    def name_for(self, node: Node, index: int) -> str:
        """A short name that no live value holds, else the longer path; `_` for one of several that nobody reads."""
        if len(node.types) > 1 and not self.graph.uses(node.outputs[index]):
            return "_"
        for name in self.candidates(node, index):
            holder = self.held.get(name)
            if name == "x" and node.outputs[index] in self.apart:
                continue
            if name not in self.reserved and (holder is None or not self.live(holder)):
                return name
        raise AssertionError(f"no name for {node.name}")

    def candidates(self, node: Node, index: int) -> tuple[str, ...]:
        """The name it is wanted by, the label that the graph returns it by, its own label, the part of the spec that it
        belongs to, its whole path."""
        ref = node.outputs[index]
        returned = [self.wanted[ref]] if ref in self.wanted else []
        returned += [label for label, output in self.graph.outputs if output == ref and label.isidentifier()]
        path = node.members[-1] if node.epilogue is not None and not node.op.gradient else node.name
        parts = path.split(".")
        parts = parts[1:] if parts[0] in self.scopes and len(parts) > 1 else parts
        labels = (node.epilogue or node.op).output_labels
        long = "_".join(parts)
        if labels and (index or node.epilogue is None):
            return *returned[:1], labels[index], f"{long}_{labels[index]}"
        if "." in path and (node.op.gradient or parts[-1].startswith("grad")):
            return *returned[:1], "_".join(parts[1:]), long
        return *returned[:1], parts[1] if len(parts) > 1 else parts[0], long, f"{long}_value"

    def live(self, ref: str) -> bool:
        """Whether a value is still read after the node at hand, or by it while lines go ahead of it."""
        if ref in self.alive or any(ref == output for _, output in self.graph.outputs):
            return True
        later = self.graph.nodes[self.position + (not self.ahead) :]
        if any(ref in node.inputs for node in later):
            return True
        return any(self.mentions(text, self.texts.get(ref, "")) for text in self.pending.values())

    def returned(self, refs: Sequence[str]) -> str:
        """What the function returns; values that would make the line long get lines of their own first."""
        while len(text := ", ".join(self.text(ref) for ref in refs)) > LINE:
            waiting = [ref for ref in refs if ref in self.pending]
            if not waiting:
                break
            self.write(waiting[0])
        return text


def _count(expr: Expr, name: str) -> int:
    """How often an expression reads a variable."""
    return int(expr == Var(name)) + sum(_count(part, name) for part in children(expr))
