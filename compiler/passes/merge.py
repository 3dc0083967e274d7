"""Merges several graphs, which are called variants, into one list of nodes (anti-unification). Each merged node records
the variants that contain it.

Variants are blocks of one module list that differ in some nodes, or programs that differ only in a cache. Generated
code runs a node unconditionally if all variants have the node, otherwise under a condition. If a node reads different
values in different variants, these values share a variable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, count, pairwise
from typing import ClassVar, Literal

from specc.compiler.ir.graph import Graph, Node, output_refs
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.ops.dropout import Dropout
from specc.compiler.records import record

NONE = "None"  # the argument that is passed if a variant does not have the value
Where = frozenset[int]
Operand = tuple[tuple[str, Where], ...]  # each value that is read, with the variants that read it
Kind = Callable[[Graph, Node], object]


class Move(Op):
    """Copies a value to another variable."""

    name: ClassVar[str] = "move"
    inline: ClassVar[bool] = False

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return args[0]


@record
class Slot:
    """A merged node. `name` is the name of the node's first output. `nodes` holds the node in each variant that
    contains it, by the index of the variant."""

    name: str
    nodes: Mapping[int, Node]
    inputs: tuple[Operand, ...] = ()

    @property
    def where(self) -> Where:
        return frozenset(self.nodes)

    @property
    def first(self) -> int:
        """The first variant of the slot. The node of this variant represents the slot."""
        return min(self.nodes)

    @property
    def node(self) -> Node:
        return self.nodes[self.first]

    @property
    def outputs(self) -> tuple[str, ...]:
        return output_refs(self.name, len(self.node.types))

    def columns(self, side: Literal["inputs", "outputs"]) -> Iterator[dict[int, str]]:
        """Yields one dict per input or output of the node. A dict maps each variant to the reference in that
        variant."""
        for refs in zip(*(getattr(node, side) for node in self.nodes.values()), strict=True):
            yield dict(zip(self.nodes, refs, strict=True))


@record
class Merged:
    """Several graphs merged into one.

    Attributes:
        variants: The graphs.
        slots: The merged nodes, in an order that is valid for every variant.
        outputs: The values to return, by label.
        variables: Maps each value that shares a variable with other values to the first of these values.
    """

    variants: tuple[Graph, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[tuple[str, Operand], ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def every(self) -> Where:
        return frozenset(range(len(self.variants)))

    def inputs(self) -> Sequence[tuple[str, TensorType, Where]]:
        """Returns the name, the type and the variants of each input. Inputs that all variants have come first."""
        entries: dict[str, tuple[TensorType, set[int]]] = {}
        for variant, graph in enumerate(self.variants):
            for name, type in graph.inputs:
                entries.setdefault(name, (type, set()))[1].add(variant)
        inputs = [(name, type, frozenset(where)) for name, (type, where) in entries.items()]
        return sorted(inputs, key=lambda entry: entry[2] != self.every)

    def operands(self) -> Iterator[tuple[int, Operand]]:
        """Yields every operand (a value that a slot reads, which may differ between variants) with the index of the
        slot that reads it. Operands of outputs have a larger index than any slot."""
        yield from ((i, operand) for i, slot in enumerate(self.slots) for operand in slot.inputs)
        yield from ((len(self.slots) + 1, operand) for _, operand in self.outputs)

    def type(self, ref: str, where: Where) -> TensorType:
        types = (slot.node.types[slot.outputs.index(ref)] for slot in self.slots if ref in slot.outputs)
        return next(types, None) or self.variants[min(where)].types[ref]


def merge(graphs: Sequence[Graph], labels: Sequence[str] | None = None, kind: Kind | None = None) -> Merged:
    """Merges the graphs of similar parts of a model, and assigns shared variables to their values. `align` describes
    the arguments."""
    merged = align(graphs, labels, kind)
    for _ in range(len(merged.slots) * 4 + 16):  # each round resolves one conflict
        variables = _Variables(merged)
        conflict = variables.join()
        if conflict is None:
            return replace(merged, variables=variables.roots())
        merged = _with_move(merged, variables.computed_at, *conflict)
    raise AssertionError("the values of the merged graphs cannot share variables")


def align(graphs: Sequence[Graph], labels: Sequence[str] | None = None, kind: Kind | None = None) -> Merged:
    """Merges the graphs of similar parts of a model, without shared variables.

    Args:
        graphs: The variants. Nodes are merged if their names, ops, epilogues, parameters and types are equal. A dim of
            1 token counts as equal to a dim of T tokens.
        labels: The labels of the outputs to return, or None for all outputs. A variant may lack some of these outputs.
        kind: A function that returns an additional key of a node, such as its kernel. Only nodes with equal keys are
            merged.
    """
    groups = _matched(graphs, kind)
    while (slots := _ordered(graphs, _united(graphs, groups))) is None:
        # the orders of the variants contradict each other, so the first group of merged nodes is divided again
        at = next(i for i, nodes in enumerate(groups) if len(nodes) > 1)
        groups[at : at + 1] = [{variant: node} for variant, node in groups[at].items()]
    values = _values(slots)
    outputs: dict[str, dict[int, str]] = {}
    for variant, graph in enumerate(graphs):
        for label, ref in graph.outputs:
            if labels is None or label in labels:
                outputs.setdefault(label, {})[variant] = values.get((variant, ref), ref)
    return Merged(tuple(graphs), tuple(slots), tuple((label, _operand(refs)) for label, refs in outputs.items()))


# Matching of nodes.


def _matched(graphs: Sequence[Graph], kind: Kind | None) -> list[dict[int, Node]]:
    """Returns all nodes in groups. A group maps the indices of variants to nodes that can be merged. The groups are
    almost in the order of the nodes in each graph."""
    keys: list[object] = []
    groups: dict[object, dict[int, Node]] = {}
    for variant, graph in enumerate(graphs):
        at = 0
        for node in graph.nodes:
            params = tuple(ref if ref[0] in "@$" else "" for ref in node.inputs)
            types = tuple((_tokens(type.shape), type.dtype) for type in node.types)
            key = node.name, node.op, node.epilogue, params, types, kind and kind(graph, node)
            if key not in groups:
                keys.insert(at, key)
            groups.setdefault(key, {})[variant] = node
            at = max(at, keys.index(key) + 1)
    return [groups[key] for key in keys]


def _tokens(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Replaces dims of 1 by T. A program for one token then matches a program for several tokens."""
    return tuple("T" if dim == 1 else dim for dim in shape)


def _united(graphs: Sequence[Graph], groups: Sequence[Mapping[int, Node]]) -> list[Slot]:
    """Returns a slot (a merged node) for each group of nodes. If two slots of different variants compute the same
    value, the two slots become one slot."""
    groups = list(groups)
    while True:
        slots: list[Slot] = []
        # A value may be an input of one variant and the output of a node in another variant.
        taken = {name for graph in graphs for name, _ in graph.inputs}
        for nodes in groups:
            slots.append(Slot(free([next(iter(nodes.values())).name], taken.__contains__), nodes))
            taken.add(slots[-1].name)
        values = _values(slots)
        slots = [replace(slot, inputs=_operands(slot.nodes, values)) for slot in slots]
        twins = ((i, j) for i, slot in enumerate(slots) for j in range(i) if _equal(slot, slots[j]))
        i, j = next(twins, (0, 0))
        if not i:
            return slots
        groups[j] = {**groups[j], **groups.pop(i)}


def _equal(slot: Slot, other: Slot) -> bool:
    a, b = slot.node, other.node
    if slot.where & other.where or a.op.in_place or (a.op, a.epilogue, a.types) != (b.op, b.epilogue, b.types):
        return False
    refs = [[[ref for ref, _ in operand] for operand in inputs] for inputs in (slot.inputs, other.inputs)]
    return bool(refs[0]) and refs[0] == refs[1] and all(len(operand) == 1 for operand in refs[0])


def _values(slots: Sequence[Slot]) -> Mapping[tuple[int, str], str]:
    return {
        (variant, ref): value
        for slot in slots
        for variant, node in slot.nodes.items()
        for ref, value in zip(node.outputs, slot.outputs, strict=True)
    }


def _operands(nodes: Mapping[int, Node], values: Mapping[tuple[int, str], str]) -> tuple[Operand, ...]:
    refs = {v: [values.get((v, ref), ref) for ref in node.inputs] for v, node in nodes.items()}
    return tuple(_operand(dict(zip(refs, column, strict=True))) for column in zip(*refs.values(), strict=True))


def _operand(by_variant: Mapping[int, str]) -> Operand:
    refs: dict[str, set[int]] = {}
    for variant, ref in by_variant.items():
        refs.setdefault(ref, set()).add(variant)
    return tuple((ref, frozenset(where)) for ref, where in refs.items())


def free(options: Sequence[str], taken: Callable[[str], bool]) -> str:
    """Returns the first option that is not taken. If all options are taken, returns the last option with a number
    appended."""
    numbered = (f"{options[-1]}_{i}" for i in count(2))
    return next(option for option in chain(options, numbered) if not taken(option))


# Order of the merged nodes.


def _ordered(graphs: Sequence[Graph], slots: Sequence[Slot]) -> list[Slot] | None:
    """Returns the slots (merged nodes) in a topological order, or None if no such order exists. Slots of the same
    variants are adjacent where possible."""
    before = _precedence(graphs, slots)
    current = every = frozenset(range(len(graphs)))
    ordered: list[Slot] = []
    names: set[str] = set()
    left = list(slots)
    while left:
        ready = [slot for slot in left if before[slot.name] <= names]
        if not ready:
            return None
        chosen = min(ready, key=lambda slot: (slot.where != current, slot.where != every - current))
        current = chosen.where
        left.remove(chosen)
        ordered.append(chosen)
        names.add(chosen.name)
    return ordered


def _precedence(graphs: Sequence[Graph], slots: Sequence[Slot]) -> Mapping[str, set[str]]:
    """Returns, for the name of each slot (a merged node), the names of the slots that must precede it.

    A slot follows the slots whose values it reads. A slot that updates a state in place keeps its order relative to
    all readers of that state. Slots that draw random numbers keep their order.
    """
    makers = {ref: slot.name for slot in slots for ref in slot.outputs}
    before = {
        slot.name: {makers[ref] for operand in slot.inputs for ref, _ in operand if ref in makers} for slot in slots
    }
    slot_of = {(variant, node.name): slot.name for slot in slots for variant, node in slot.nodes.items()}
    for variant, graph in enumerate(graphs):
        names = [slot_of[variant, node.name] for node in graph.nodes]
        for i, node in enumerate(graph.nodes):
            for j, other in enumerate(graph.nodes if node.op.in_place else ()):
                if i != j and node.inputs[0] in other.inputs:
                    before[names[max(i, j)]].add(names[min(i, j)])
        draws = [name for name, node in zip(names, graph.nodes, strict=True) if isinstance(node.op, Dropout)]
        for first, second in pairwise(draws):
            before[second].add(first)
    return before


# Assignment of values to variables.


def _with_move(merged: Merged, taken: Mapping[str, int], operand: Operand, ref: str, where: Where) -> Merged:
    """Returns the merged graph with a Move that copies `ref`, a value of `operand`, to a separate variable. Without
    the Move, another value would overwrite the variable while `ref` is still needed."""
    others = [other for other, _ in operand if other not in (ref, NONE)]
    name = free([f"{others[0].replace(':', '.')}.else"], taken.__contains__)
    type = TensorType((), "f32") if ref == NONE else merged.type(ref, where)
    move = Slot(name, dict.fromkeys(where, Node(name, Move(), (ref,), (type,))), (((ref, where),),))
    at = max(taken.get(other, -1) for other in (*others, ref)) + 1
    moved = tuple((name if other == ref else other, variants) for other, variants in operand)
    slots = [
        replace(slot, inputs=tuple(moved if read == operand else read for read in slot.inputs)) for slot in merged.slots
    ]
    outputs = tuple((label, moved if read == operand else read) for label, read in merged.outputs)
    return replace(merged, slots=(*slots[:at], move, *slots[at:]), outputs=outputs)


class _Variables:
    """Sets of values that share a variable. Two sets are joined only if no value of one set is live at the same time as
    a value of the other set."""

    def __init__(self, merged: Merged) -> None:
        self.computed_at = {name: -1 for name, _, _ in merged.inputs()}
        self.where = {name: where for name, _, where in merged.inputs()}
        self.optional = {name for name, where in self.where.items() if where != merged.every}
        for i, slot in enumerate(merged.slots):
            self.computed_at |= dict.fromkeys(slot.outputs, i)
            self.where |= dict.fromkeys(slot.outputs, slot.where)
        self.last = {(ref, v): at for at, operand in merged.operands() for ref, where in operand for v in where}
        self.operands = [operand for _, operand in merged.operands() if len(operand) > 1]
        self.sets: dict[str, set[str]] = {}

    def join(self) -> tuple[Operand, str, Where] | None:
        """Lets the values of every operand share a variable, and returns None. If a value cannot share the variable,
        returns the operand, the reference of the value, and its variants."""
        for operand in self.operands:
            refs = sorted(
                (entry for entry in operand if entry[0] != NONE), key=lambda entry: -self.computed_at[entry[0]]
            )
            if lacking := [entry for entry in operand if entry[0] == NONE]:
                (other, _), *more = refs
                if more or self.computed_at[other] != -1:
                    return operand, *lacking[0]
            base = self.sets.setdefault(refs[0][0], {refs[0][0]})
            for ref, where in refs[1:]:
                joined = self.sets.setdefault(ref, {ref})
                if joined is base:
                    continue
                if any(self._meet(a, b) for a in base for b in joined):
                    return operand, ref, where
                base |= joined
                self.sets |= dict.fromkeys(joined, base)
        return None

    def _meet(self, a: str, b: str) -> bool:
        """Returns whether two values must have different variables. Two values must have different variables if both
        values are live at the same time in some variant, or if one of the two values is an optional input. Generated
        code tests an optional input for None, so no other value may overwrite the input."""
        if self.computed_at[a] == self.computed_at[b] == -1 or self.optional & {a, b}:
            return True
        return any(
            self.computed_at[a] < self.last.get((b, v), self.computed_at[b])
            and self.computed_at[b] < self.last.get((a, v), self.computed_at[a])
            for v in self.where[a] & self.where[b]
        )

    def roots(self) -> Mapping[str, str]:
        """Maps every value that shares a variable with other values to the first of these values. If an input shares
        the variable, the input is the first value."""
        return {
            ref: min(members, key=lambda member: (self.computed_at[member], member))
            for ref, members in self.sets.items()
            if len(members) > 1
        }
