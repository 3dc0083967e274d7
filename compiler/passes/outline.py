"""Moves the common parts of several programs into methods that the programs call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from specc.compiler.ir.graph import Graph, Node, Op, TensorType, node_of, output_refs, rename
from specc.compiler.passes.merge import NONE, Kind, Merged, Slot, Where, align, merge
from specc.compiler.passes.roll import STATES, Loop

WORTH = 3  # a section without a loop over blocks becomes a method only if it has more nodes than this


@dataclass(frozen=True, slots=True)
class Section(Op):
    """Calls the method `method`.

    Attributes:
        method: The name of the method.
        names: The names of its parameters.
        optional: The parameters that some callers do not pass.
        labels: The labels of its outputs.
        keeps: Whether the state is passed to it.
    """

    name: ClassVar[str] = "section"
    inline: ClassVar[bool] = True
    method: str
    names: tuple[str, ...]
    optional: frozenset[str]
    labels: tuple[str, ...]
    keeps: bool = False

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels if len(self.labels) > 1 else ()


@dataclass(frozen=True)
class Outlined:
    """Programs whose common parts are method calls, and the methods as merged graphs, by name. A program that consists
    entirely of such a part is itself the method, and is removed from the programs."""

    programs: tuple[Graph, ...]
    methods: Mapping[str, Merged]


def outline(
    graphs: Sequence[Graph],
    sides: frozenset[str],
    taken: frozenset[str],
    reserved: frozenset[str],
    kind: Kind,
    told: Callable[[str, Merged], bool] = lambda name, merged: True,
) -> Outlined:
    """Moves common parts of programs into methods.

    Args:
        graphs: the programs, rolled and aligned.
        sides: first words of nodes that name a side of the model.
        taken: names of methods that the model has.
        reserved: names that no argument may have.
        kind: what two nodes have to have in common to be one, besides what they compute.
        told: whether a method of that name can tell its variants apart. Programs that no method can be shared by are
            left to those that fewer of them share.
    """
    programs = list(graphs)
    methods: dict[str, Merged] = {}
    done: set[Where] = set()
    replaced: set[str] = set()
    while True:
        merged = align(programs, kind=kind)
        chosen = next(
            (
                (where, slots)
                for where in _candidates(merged)
                if where not in done and (slots := _section(merged, where)) and _worth(slots)
            ),
            None,
        )
        if chosen is None:
            left = tuple(graph for graph in programs if graph.name not in replaced)
            return Outlined(left, methods)
        where, slots = chosen
        done.add(where)
        whole = [
            v
            for v in where
            if len(programs[v].nodes) == sum(v in slot.nodes for slot in slots)
            and not any(label.startswith(STATES) for label, _ in programs[v].outputs)
        ]
        name = programs[whole[0]].name if whole else _method_name(slots, sides, taken | methods.keys())
        section = _Section(merged, where, slots, name, sides, reserved, tuple(programs[v] for v in whole[:1]))
        if not section.complete:
            continue
        method = merge(section.bodies(), kind=kind)
        if not told(name, method):
            continue
        methods[name] = method
        for variant in where:
            programs[variant] = section.calling(variant)
        replaced |= {programs[variant].name for variant in whole[:1]}


def _candidates(merged: Merged) -> Sequence[Where]:
    """Returns the sets of at least two programs that have a node in common, larger sets first."""
    found = dict.fromkeys(slot.where for slot in merged.slots if len(slot.where) > 1)
    return sorted(found, key=lambda where: -len(where))


def _worth(slots: Sequence[Slot]) -> bool:
    return any(isinstance(slot.node.op, Loop) for slot in slots) or len(slots) > WORTH


def _section(merged: Merged, where: Where) -> Sequence[Slot]:
    """Returns the slots that the programs `where` have in common, and slots that only some of them run between common
    slots or on the values that common slots read."""
    slots = [slot for slot in merged.slots if slot.where <= where]
    makers = {ref: slot for slot in slots for ref in slot.outputs}
    common = [slot for slot in slots if slot.where == where and not isinstance(slot.node.op, Section)]
    own = {slot.name for slot in common}
    read = {ref for slot in common for operand in slot.inputs for ref, _ in operand}
    inputs = {name for name, _, _ in merged.inputs()} & read
    before: set[str] = set()  # transitive producers of the common nodes
    for slot in reversed(slots):
        if slot.name in own or slot.name in before:
            before |= {makers[ref].name for operand in slot.inputs for ref, _ in operand if ref in makers}
    chosen = set(own)
    for slot in slots:
        refs = {ref for operand in slot.inputs for ref, _ in operand}
        inside = {ref for ref in refs if ref in makers and makers[ref].name in chosen}
        state = {ref for ref in refs if ref.startswith(STATES)}
        ahead = slot.name in before and not isinstance(slot.node.op, Section)
        if (ahead and (inside or refs & (inputs - state))) or (
            slot.node.op.in_place and refs - inside - inputs <= state
        ):
            chosen.add(slot.name)
    return [slot for slot in slots if slot.name in chosen]


def _method_name(slots: Sequence[Slot], sides: frozenset[str], taken: frozenset[str]) -> str:
    words = [slot.node.name.partition(".")[0] for slot in slots if "." in slot.node.name]
    side = next((f"{word}_features" for word in words[:1] if word in sides), "features")
    made = _parts(slots[-1].node.name, sides)
    names = (side, made[-1] if len(made) < 2 else made[1], "_".join(made), *(f"features_{i}" for i in range(2, 99)))
    return next(name for name in names if name not in taken and name.isidentifier())


class _Section:
    """One common part, with its inputs and outputs in each program."""

    def __init__(
        self,
        merged: Merged,
        where: Where,
        slots: Sequence[Slot],
        name: str,
        sides: frozenset[str],
        reserved: frozenset[str],
        whole: Sequence[Graph] = (),
    ) -> None:
        self.reserved = reserved
        self.merged, self.where, self.slots, self.name, self.sides = merged, where, slots, name, sides
        self.own = {variant: {slot.nodes[variant].name for slot in slots if variant in slot.nodes} for variant in where}
        order = [name for graph in whole for name, _ in graph.inputs]  # a program that it replaces is called as before
        variants = [merged.variants.index(graph) for graph in whole]
        found = self._inputs()
        places = {
            name: next((order.index(passed[v]) for v in variants if passed.get(v) in order), len(order))
            for name, passed in found.items()
        }
        self.inputs = {name: found[name] for name in sorted(found, key=lambda name: places[name])}
        self.outputs = self._outputs()
        self.returned = {label: self._returned(refs) for label, refs in self.outputs.items()}

    def _inputs(self) -> dict[str, dict[int, str]]:
        """Returns parameter name -> ref that each program passes. State is not a parameter; it is passed as a whole."""
        found: list[dict[int, str]] = []
        for slot in self.slots:
            for i in range(len(slot.inputs)):
                outside = {
                    variant: node.inputs[i]
                    for variant, node in slot.nodes.items()
                    if node_of(node.inputs[i]) not in self.own[variant] and node.inputs[i][0] not in "@$"
                }
                outside = {variant: ref for variant, ref in outside.items() if ref != NONE}
                if not outside or all(ref.startswith(STATES) for ref in outside.values()):
                    continue
                while (known := next((one for one in found if _agree(one, outside)), None)) is not None:
                    found.remove(known)
                    outside = known | outside
                found.append(outside)
        names: dict[str, dict[int, str]] = {}
        for one in found:
            options = self._names(one)
            names[next(option for option in options if option not in names)] = one
        return names

    def _names(self, passed: Mapping[int, str]) -> Sequence[str]:
        """Returns candidate names of a parameter in order of preference: the most frequent of the names that its values
        have in the programs and in the loops that read them."""
        options: list[str] = []
        for variant, ref in passed.items():
            graph = self.merged.variants[variant]
            for node in graph.nodes:
                if isinstance(node.op, Loop) and node.name in self.own[variant] and ref in node.inputs[1:]:
                    options.append(node.op.names[node.inputs.index(ref, 1) - 1])
            if not ref.startswith(STATES):
                options += _called(graph, ref, self.sides)[:1]
        options = [option for option in options if option != "x" and option not in self.reserved] or ["value"]
        options = sorted(options, key=lambda option: -options.count(option))
        return [*options, *(f"{option}_{i}" for i in range(2, 99) for option in options[:1])]

    def _outputs(self) -> dict[str, dict[int, str]]:
        """Returns the values that are read from outside: label -> ref in each program."""
        values: dict[tuple[str, int], dict[int, str]] = {}
        for variant in sorted(self.where):
            graph = self.merged.variants[variant]
            read = [ref for node in graph.nodes if node.name not in self.own[variant] for ref in node.inputs]
            read += [ref for _, ref in graph.outputs]
            for slot in self.slots:
                node = slot.nodes.get(variant)
                for j, ref in enumerate(node.outputs if node is not None else ()):
                    if ref in read and not (node is not None and node.op.in_place):
                        values.setdefault((slot.name, j), {})[variant] = ref
        merged: list[dict[int, str]] = []
        for made in values.values():  # values that replace each other across programs are one output
            twin = next((one for one in merged if not one.keys() & made.keys() and self._alike(one, made)), None)
            if twin is None:
                merged.append(made)
            else:
                twin |= made
        names: dict[str, dict[int, str]] = {}
        for one in merged:
            variant, ref = next(iter(one.items()))
            options = _called(self.merged.variants[variant], ref, self.sides)
            names[next(option for option in options if option not in names)] = one
        return names

    @property
    def complete(self) -> bool:
        """Whether each program makes all that is returned."""
        return all(refs.keys() >= self.where for refs in self.returned.values())

    def _returned(self, read: Mapping[int, str]) -> dict[int, str]:
        """The outputs of each program that some of the programs read."""
        found = dict(read)
        for slot in self.slots:
            for j in range(len(slot.node.types)):
                refs = {variant: node.outputs[j] for variant, node in slot.nodes.items()}
                if any(refs.get(variant) == ref for variant, ref in read.items()):
                    found = refs | found
        return found

    def _alike(self, one: Mapping[int, str], other: Mapping[int, str]) -> bool:
        """Whether values of different programs are read by one merged node, as the same input."""
        for slot in self.merged.slots:
            for i in range(len(slot.inputs)):
                refs = {variant: node.inputs[i] for variant, node in slot.nodes.items()}
                if any(refs.get(v) == ref for v, ref in one.items()) and any(
                    refs.get(v) == ref for v, ref in other.items()
                ):
                    return True
        return False

    def bodies(self) -> list[Graph]:
        """Returns the section of each program as a graph."""
        made = []
        for variant in sorted(self.where):
            graph = self.merged.variants[variant]
            nodes = tuple(node for node in graph.nodes if node.name in self.own[variant])
            names = {passed[variant]: name for name, passed in self.inputs.items() if variant in passed}
            read = {ref for node in nodes for ref in node.inputs}
            types = graph.types
            inputs = tuple((name, types[ref]) for ref, name in names.items())
            inputs += tuple((n, t) for n, t in graph.inputs if n.startswith(STATES) and n in read and n not in names)
            params = tuple(entry for entry in graph.params if f"@{entry[0]}" in read)
            outputs = tuple((label, refs[variant]) for label, refs in self.returned.items() if variant in refs)
            body = Graph(graph.name, inputs, params, nodes, outputs, graph.scalars)
            made.append(rename(body, names))
        return made

    def calling(self, variant: int) -> Graph:
        """Returns the program with its section replaced by a call."""
        graph = self.merged.variants[variant]
        passed = {name: refs.get(variant, NONE) for name, refs in self.inputs.items()}
        optional = frozenset(name for name, refs in self.inputs.items() if refs.keys() != self.where)
        labels = tuple(self.outputs)
        refs = [outputs.get(variant, "") for outputs in self.outputs.values()]
        types = tuple(graph.types[ref] if ref else TensorType((), "f32") for ref in refs)
        given = set(passed.values())
        keeps = any(
            (isinstance(node.op, Loop) and (node.op.keeps or node.op.extends))
            or any(ref.startswith(STATES) and ref not in given for ref in node.inputs)
            for node in graph.nodes
            if node.name in self.own[variant]
        )
        op = Section(self.name, tuple(passed), optional, labels, keeps)
        call = Node(self.name, op, tuple(passed.values()), types)
        renamed = {ref: out for ref, out in zip(refs, output_refs(self.name, len(refs)), strict=True) if ref}
        own = self.own[variant]
        first = next(i for i, node in enumerate(graph.nodes) if node.name in own)
        before = graph.nodes[:first]
        rest = [node for node in graph.nodes[first:] if node.name not in own]
        needed = {node_of(ref) for ref in call.inputs}
        ahead: list[Node] = []
        for node in reversed(rest):  # the producers of the call's arguments precede it
            if node.name in needed:
                ahead.insert(0, node)
                needed |= {node_of(ref) for ref in node.inputs}
        behind = [node for node in rest if node not in ahead]
        nodes = (*before, *ahead, call, *behind)
        used = {ref for node in nodes for ref in node.inputs}
        inputs = tuple(e for e in graph.inputs if not e[0].startswith(STATES) or e[0] in used)
        return rename(replace(graph, nodes=nodes, inputs=inputs), renamed)


def _agree(one: Mapping[int, str], other: Mapping[int, str]) -> bool:
    """Whether two parameters are the same: at least one program passes both, and every such program passes the same
    value for both."""
    both = one.keys() & other.keys()
    return bool(both) and all(one[variant] == other[variant] for variant in both)


def _called(graph: Graph, ref: str, sides: frozenset[str]) -> Sequence[str]:
    """Returns names for a value, shorter names first: an input's own name, else the op's output label and parts of the
    node's path."""
    node = graph.by_name.get(node_of(ref))
    if node is None:
        return (ref.replace(".", "_"),)
    parts = _parts(node.name, sides)
    labels = node.op.output_labels
    label = [labels[node.outputs.index(ref)]] if labels else []
    long = "_".join((*parts, *label))
    return (*label, *parts[1:2], parts[0], long, *(f"{long}_{i}" for i in range(2, 99)))


def _parts(name: str, sides: frozenset[str]) -> Sequence[str]:
    """Returns the words of a node's path, without the side of the model."""
    parts = name.split(".")
    return parts[1:] if parts[0] in sides and len(parts) > 1 else parts
