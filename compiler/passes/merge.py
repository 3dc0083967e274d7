"""Anti-unification: merges several graphs into one list of nodes, each with the set of variants that run it.

Variants of one function are blocks that differ only in parts, or programs that differ only in a cache. A node that all
variants have is common; other nodes are guarded. Values that replace each other across variants share a variable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from specc.compiler.ir.graph import Dim, Graph, Named, Node, Op, TensorType, output_refs
from specc.compiler.ops.dropout import Dropout

NONE = "None"  # the value of an argument that a variant does not have
Where = frozenset[int]
Operand = tuple[tuple[str, Where], ...]  # each value read, with the variants that read it
Kind = Callable[[Graph, Node], object]


@dataclass(frozen=True, slots=True)
class Move(Op):
    """Copies a value to another variable."""

    name: ClassVar[str] = "move"
    inline: ClassVar[bool] = False

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return args[0]


@dataclass(frozen=True, slots=True)
class Slot:
    """A node of the merged graph. `name` is that of its first output. `nodes` maps each variant that runs it to its
    node there."""

    name: str
    nodes: Mapping[int, Node]
    inputs: tuple[Operand, ...]

    @property
    def where(self) -> Where:
        return frozenset(self.nodes)

    @property
    def first(self) -> int:
        """The variant whose node represents all."""
        return min(self.nodes)

    @property
    def node(self) -> Node:
        return self.nodes[self.first]

    @property
    def outputs(self) -> tuple[str, ...]:
        return output_refs(self.name, len(self.node.types))


@dataclass(frozen=True)
class Merged:
    """Several graphs merged into one.

    Attributes:
        variants: The graphs.
        slots: The merged nodes, in an order that is valid for every variant.
        outputs: The values to return, by label.
        variables: Each value that shares a variable -> the first value of that variable.
    """

    variants: tuple[Graph, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[tuple[str, Operand], ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def every(self) -> Where:
        return frozenset(range(len(self.variants)))

    def inputs(self) -> Iterator[tuple[str, TensorType, Where]]:
        """Yields each input with its type and the variants that have it. Inputs that all variants have come first."""
        found: dict[str, tuple[TensorType, set[int]]] = {}
        for variant, graph in enumerate(self.variants):
            for name, type in graph.inputs:
                found.setdefault(name, (type, set()))[1].add(variant)
        entries = [(name, type, frozenset(where)) for name, (type, where) in found.items()]
        yield from sorted(entries, key=lambda entry: entry[2] != self.every)

    def params(self) -> Iterator[tuple[Named, Where]]:
        """Yields each parameter with the variants that read it."""
        found: dict[Named, set[int]] = {}
        for variant, graph in enumerate(self.variants):
            for entry in graph.params:
                found.setdefault(entry, set()).add(variant)
        return ((entry, frozenset(where)) for entry, where in found.items())


def merge(graphs: Sequence[Graph], labels: Sequence[str] | None = None, kind: Kind | None = None) -> Merged:
    """Merges graphs that were lowered from similar parts, and lets their values share variables. Arguments are those of
    `align`."""
    return _named(align(graphs, labels, kind))


def align(graphs: Sequence[Graph], labels: Sequence[str] | None = None, kind: Kind | None = None) -> Merged:
    """Merges graphs that were lowered from similar parts, without shared variables.

    Args:
        graphs: The variants. Nodes of equal name, op, epilogue, parameters and types are merged; a dim of 1 token
            matches T tokens.
        labels: The outputs to return, or None for all. A variant may lack some of them.
        kind: A further key that must be equal for two nodes to be merged, e.g. their kernel.
    """
    slots = _aligned(graphs, kind)
    wanted = dict.fromkeys(label for graph in graphs for label, _ in graph.outputs if labels is None or label in labels)
    while True:
        values = _values(graphs, slots)
        made = _unified(graphs, slots, values)
        if (ordered := _ordered(graphs, made)) is not None:
            break
        _split(slots)
    values = {(v, ref): out for slot in ordered for v, node in slot.nodes.items() for ref, out in _pairs(slot, node)}
    outputs = []
    for label in wanted:
        refs = {v: dict(graph.outputs)[label] for v, graph in enumerate(graphs) if label in dict(graph.outputs)}
        outputs.append((label, _operand({v: values.get((v, ref), ref) for v, ref in refs.items()})))
    return Merged(tuple(graphs), tuple(ordered), tuple(outputs))


# Matching of nodes.


@dataclass
class _Draft:
    """A slot under construction."""

    nodes: dict[int, Node]
    key: object


def _aligned(graphs: Sequence[Graph], kind: Kind | None) -> list[_Draft]:
    """Returns one draft for all nodes of a key, in an order close to that of each graph."""
    drafts: list[_Draft] = []
    table: dict[object, _Draft] = {}
    for variant, graph in enumerate(graphs):
        at = 0
        for node in graph.nodes:
            key = _key(graph, node, kind)
            draft = table.get(key)
            if draft is None:
                draft = table[key] = _Draft({}, key)
                drafts.insert(at, draft)
            draft.nodes[variant] = node
            at = max(at, drafts.index(draft) + 1)
    return drafts


def _key(graph: Graph, node: Node, kind: Kind | None) -> tuple[object, ...]:
    params = tuple(ref if ref[0] in "@$" else "" for ref in node.inputs)
    types = tuple((_tokens(type.shape), type.dtype) for type in node.types)
    return node.name, node.op, node.epilogue, params, types, kind(graph, node) if kind is not None else None


def _tokens(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Returns the shape with dims of 1 replaced by T, so that a program for one token matches one for several."""
    return tuple("T" if dim == 1 else dim for dim in shape)


def _split(drafts: list[_Draft]) -> None:
    """Splits the first draft that several variants share, because the orders of the variants contradict each other."""
    shared = next(draft for draft in drafts if len(draft.nodes) > 1)
    at = drafts.index(shared)
    drafts[at : at + 1] = [_Draft({variant: node}, (shared.key, variant)) for variant, node in shared.nodes.items()]


def _values(graphs: Sequence[Graph], drafts: Sequence[_Draft]) -> dict[tuple[int, str], str]:
    """Returns the merged name of every value of every variant. An input of one variant may be a node of another, so no
    node gets the name of an input."""
    values: dict[tuple[int, str], str] = {}
    taken = {name for graph in graphs for name, _ in graph.inputs}
    for draft in drafts:
        node = next(iter(draft.nodes.values()))
        name = next(name for i in range(len(drafts) + 1) if (name := f"{node.name}{'~' * i}") not in taken)
        taken.add(name)
        for variant, own in draft.nodes.items():
            for ref, out in zip(own.outputs, output_refs(name, len(own.types)), strict=True):
                values[variant, ref] = out
    return values


def _unified(graphs: Sequence[Graph], drafts: Sequence[_Draft], values: dict[tuple[int, str], str]) -> list[Slot]:
    """Returns the slots of the drafts. Slots of different variants that compute the same from the same values are
    merged. Updates `values`."""
    slots: list[Slot] = []
    for draft in drafts:
        first = next(iter(draft.nodes))
        name = values[first, draft.nodes[first].name]
        slots.append(Slot(name, draft.nodes, _operands(draft.nodes, values)))
    done = False
    while not done:
        done = True
        for i, slot in enumerate(slots):
            if (twin := next((other for other in slots[:i] if _equal(graphs, slot, other)), None)) is not None:
                both = replace(twin, nodes={**twin.nodes, **slot.nodes})
                for variant, node in slot.nodes.items():
                    values |= {(variant, ref): out for ref, out in zip(node.outputs, both.outputs, strict=True)}
                slots[slots.index(twin)] = both
                del slots[i]
                slots = [replace(one, inputs=_operands(one.nodes, values)) for one in slots]
                done = False
                break
    return slots


def _equal(graphs: Sequence[Graph], slot: Slot, other: Slot) -> bool:
    """Whether two slots of different variants are the same computation under two names."""
    same = all(
        getattr(slot.node, field) == getattr(other.node, field) for field in ("op", "epilogue", "types")
    ) and len(slot.inputs) == len(other.inputs)
    if not same or slot.where & other.where or slot.node.op.in_place:
        return False
    pairs = list(zip(slot.inputs, other.inputs, strict=True))
    return bool(pairs) and all(len(a) == len(b) == 1 and a[0][0] == b[0][0] for a, b in pairs)


def _operands(nodes: Mapping[int, Node], values: Mapping[tuple[int, str], str]) -> tuple[Operand, ...]:
    count = len(next(iter(nodes.values())).inputs)
    return tuple(
        _operand({v: values.get((v, node.inputs[i]), node.inputs[i]) for v, node in nodes.items()})
        for i in range(count)
    )


def _operand(by_variant: Mapping[int, str]) -> Operand:
    refs: dict[str, set[int]] = {}
    for variant, ref in by_variant.items():
        refs.setdefault(ref, set()).add(variant)
    return tuple((ref, frozenset(where)) for ref, where in refs.items())


def _pairs(slot: Slot, node: Node) -> Iterator[tuple[str, str]]:
    return zip(node.outputs, slot.outputs, strict=True)


# Order of the merged nodes.


def _ordered(graphs: Sequence[Graph], slots: Sequence[Slot]) -> list[Slot] | None:
    """Returns the slots in a topological order that groups slots of equal variants, or None if there is no such
    order."""
    behind = _precedence(graphs, slots)
    every = frozenset(range(len(graphs)))
    current, done = every, list[Slot]()
    names: set[str] = set()
    left = list(slots)
    while left:
        ready = [slot for slot in left if behind[slot.name] <= names]
        if not ready:
            return None
        same = [slot for slot in ready if slot.where == current]
        opposite = [slot for slot in ready if slot.where == every - current]
        chosen = (same or opposite or ready)[0]
        current = chosen.where
        left.remove(chosen)
        done.append(chosen)
        names.add(chosen.name)
    return done


def _precedence(graphs: Sequence[Graph], slots: Sequence[Slot]) -> dict[str, set[str]]:
    """Returns the names of the slots that must precede each slot.

    These are the slots it reads, the readers of a state before that state is updated in place, and for a slot that
    draws random numbers the slots that draw before it.
    """
    makers = {ref: slot.name for slot in slots for ref in slot.outputs}
    behind = {
        slot.name: {makers[ref] for operand in slot.inputs for ref, _ in operand if ref in makers} for slot in slots
    }
    of = {(variant, node.name): slot.name for slot in slots for variant, node in slot.nodes.items()}
    for variant, graph in enumerate(graphs):
        drawn = ""
        for i, node in enumerate(graph.nodes):
            if node.op.in_place:
                for other in graph.nodes[:i]:
                    if node.inputs[0] in other.inputs:
                        behind[of[variant, node.name]].add(of[variant, other.name])
                for other in graph.nodes[i + 1 :]:
                    if node.inputs[0] in other.inputs:
                        behind[of[variant, other.name]].add(of[variant, node.name])
            if isinstance(node.op, Dropout):
                behind[of[variant, node.name]] |= {drawn} - {""}
                drawn = of[variant, node.name]
    return behind


# Assignment of values to variables.


def _named(merged: Merged) -> Merged:
    """Returns the merged graph with shared variables for values that replace each other across variants. If such a
    value is still live when another is computed, it is moved to a variable of its own."""
    slots, outputs = list(merged.slots), list(merged.outputs)
    variables = _Variables(merged)
    for _ in range(len(slots) * 4 + 16):  # each round resolves one conflict
        variables = _Variables(replace(merged, slots=tuple(slots), outputs=tuple(outputs)))
        conflict = variables.settle()
        if conflict is None:
            return replace(merged, slots=tuple(slots), outputs=tuple(outputs), variables=variables.roots())
        operand, ref, where = conflict
        others = [variables.made[other] for other, _ in operand if other != ref and other != NONE]
        name = next(
            n
            for i in range(len(slots) + 2)
            if (n := f"{others and _base(operand, ref)}.else{'~' * i}") not in variables.made
        )
        kind = TensorType((), "f32") if ref == NONE else _type_of(merged, slots, ref, min(where))
        node = Node(name, Move(), (ref,), (kind,))
        move = Slot(name, dict.fromkeys(where, node), (((ref, where),),))
        slots.insert(max((*others, variables.made.get(ref, -1)), default=-1) + 1, move)
        moved = tuple((name if one == ref else one, variants) for one, variants in operand)
        slots = [
            slot
            if slot is move
            else replace(slot, inputs=tuple(moved if one == operand else one for one in slot.inputs))
            for slot in slots
        ]
        outputs = [(label, moved if one == operand else one) for label, one in outputs]
    raise AssertionError("values of merged graphs have no variables")


def _base(operand: Operand, ref: str) -> str:
    """Returns the name of the value that a moved value replaces."""
    return next(other for other, _ in operand if other not in (ref, NONE)).replace(":", ".")


def _type_of(merged: Merged, slots: Sequence[Slot], ref: str, variant: int) -> TensorType:
    for slot in slots:
        if ref in slot.outputs:
            return slot.node.types[slot.outputs.index(ref)]
    return merged.variants[variant].types[ref]


class _Variables:
    """Sets of values that share a variable. A set grows as long as no two of its values are live at once in any
    variant."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        self.made = {ref: i for i, slot in enumerate(merged.slots) for ref in slot.outputs}
        self.where = {ref: slot.where for slot in merged.slots for ref in slot.outputs}
        for name, _, where in merged.inputs():
            self.made[name], self.where[name] = -1, where
        self.last: dict[tuple[str, int], int] = {}
        self.operands: list[Operand] = []
        for i, slot in enumerate(merged.slots):
            self._read(slot.inputs, i)
        self._read([operand for _, operand in merged.outputs], len(merged.slots) + 1)
        self.sets: dict[str, set[str]] = {}

    def _read(self, operands: Sequence[Operand], at: int) -> None:
        self.operands += [operand for operand in operands if len(operand) > 1]
        for operand in operands:
            for ref, where in operand:
                self.last |= {(ref, variant): at for variant in where}

    def settle(self) -> tuple[Operand, str, Where] | None:
        """Joins the values of every operand. Returns the first value that cannot be joined, as its operand, ref and
        variants, or None if all can."""
        for operand in self.operands:
            refs = sorted((one for one in operand if one[0] != NONE), key=lambda one: -self.made[one[0]])
            if lacking := [one for one in operand if one[0] == NONE]:
                (other, _), *more = refs
                if more or self.made[other] != -1:
                    return operand, *lacking[0]
            base = self.sets.setdefault(refs[0][0], {refs[0][0]})
            for ref, where in refs[1:]:
                other_set = self.sets.setdefault(ref, {ref})
                if other_set is base:
                    continue
                if any(self._meet(a, b) for a in base for b in other_set):
                    return operand, ref, where
                base |= other_set
                for member in other_set:
                    self.sets[member] = base
        return None

    def _meet(self, a: str, b: str) -> bool:
        """Whether both values are live at once in some variant."""
        if self.made[a] == self.made[b] == -1:
            return True  # every input has a variable of its own
        return any(
            self.made[a] < self.last.get((b, v), self.made[b]) and self.made[b] < self.last.get((a, v), self.made[a])
            for v in self.where[a] & self.where[b]
        )

    def roots(self) -> Mapping[str, str]:
        """Returns every value that shares a variable -> the first value of that variable, an input if there is one."""
        return {
            ref: min(members, key=lambda one: (self.made[one], one))
            for ref, members in self.sets.items()
            if len(members) > 1
        }
