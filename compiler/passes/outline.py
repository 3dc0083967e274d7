"""Moves the common parts of several programs, called sections, into methods that the programs call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.ir.graph import Graph, Node, needed, node_of, output_refs, rename
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.passes.merge import NONE, Kind, Merged, Slot, Where, align, free, merge
from specc.compiler.passes.roll import STATES, Loop
from specc.compiler.records import record

WORTH = 3  # a section without a loop over blocks becomes a method only if the section has more nodes than this number


@record
class Section(Op):
    """Calls a method, which contains a common part of several programs.

    Attributes:
        method: The name of the method.
        names: The names of the method's parameters.
        optional: The parameters that some callers do not pass.
        labels: The labels of the method's outputs.
        keeps: Whether the method receives the state, the values that persist between tokens.
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


class Outlined(NamedTuple):
    """The result of `outline`. In `programs`, calls of methods replace common parts. `methods` maps the name of each
    method to a merged graph. A program that consists entirely of a common part becomes a method, and is not in
    `programs`."""

    programs: tuple[Graph, ...]
    methods: Mapping[str, Merged]


def outline(
    graphs: Sequence[Graph],
    sides: frozenset[str],
    taken: frozenset[str],
    reserved: frozenset[str],
    kind: Kind,
    distinguishes: Callable[[str, Merged], bool],
) -> Outlined:
    """Moves common parts of programs into methods.

    Args:
        graphs: The programs after `roll` and `aligned`.
        sides: The first words of node names that name a part of the model, such as `encoder`.
        taken: The names of the model's methods.
        reserved: The names that arguments must not have.
        kind: A function that returns an additional key of a node. Only nodes with equal keys are merged.
        distinguishes: A function that returns whether the arguments of a method determine the calling program. If it
            returns False, the pass tries a section of fewer programs.
    """
    programs = list(graphs)
    methods: dict[str, Merged] = {}
    tried: set[Where] = set()
    replaced: set[str] = set()
    while True:
        merged = align(programs, kind=kind)
        shared = dict.fromkeys(slot.where for slot in merged.slots if len(slot.where) > 1)
        candidates = sorted((where for where in shared if where not in tried), key=len, reverse=True)
        sections = ((where, _section(merged, where)) for where in candidates)
        where, slots = next(((where, slots) for where, slots in sections if _worth(slots)), (frozenset[int](), ()))
        if not slots:
            return Outlined(tuple(graph for graph in programs if graph.name not in replaced), methods)
        tried.add(where)
        whole = next((v for v in sorted(where) if _is_section(programs[v], v, slots)), None)
        name = programs[whole].name if whole is not None else _method_name(slots, sides, taken | methods.keys())
        section = _Section(merged, where, slots, name, sides, reserved, whole)
        if whole is not None and not section.stands_for(programs[whole]):
            name, whole = _method_name(slots, sides, taken | methods.keys()), None
            section = _Section(merged, where, slots, name, sides, reserved, None)
        if any(refs.keys() < where for refs in section.returned.values()):
            continue  # a program need not compute every output of the method
        if any(map(section.reads_itself, where)):
            continue
        method = merge(section.bodies(), kind=kind)
        if not distinguishes(name, method):
            continue
        methods[name] = method
        for variant in where:
            programs[variant] = section.calling(variant)
        replaced |= {programs[whole].name} if whole is not None else set()


def _worth(slots: Sequence[Slot]) -> bool:
    return any(isinstance(slot.node.op, Loop) for slot in slots) or len(slots) > WORTH


def _is_section(graph: Graph, variant: int, slots: Sequence[Slot]) -> bool:
    stated = any(label.startswith(STATES) for label, _ in graph.outputs)
    return not stated and len(graph.nodes) == sum(variant in slot.nodes for slot in slots)


def _section(merged: Merged, where: Where) -> Sequence[Slot]:
    """Returns the slots (merged nodes) that all programs in `where` run. Slots of only some of these programs are
    included if they are between common slots, or if common slots read their values."""
    slots = [slot for slot in merged.slots if slot.where <= where]
    makers = {ref: slot.name for slot in slots for ref in slot.outputs}
    read = {slot.name: {ref for operand in slot.inputs for ref, _ in operand} for slot in slots}
    chosen = {slot.name for slot in slots if slot.where == where and not isinstance(slot.node.op, Section)}
    inputs = {name for name, _, _ in merged.inputs()} & {ref for name in chosen for ref in read[name]}
    producers: set[str] = set()  # all nodes on which common nodes depend
    for slot in reversed(slots):
        if slot.name in chosen | producers:
            producers |= {makers[ref] for ref in read[slot.name] if ref in makers}
    for slot in slots:
        refs = read[slot.name]
        inside = {ref for ref in refs if makers.get(ref) in chosen}
        state = {ref for ref in refs if ref.startswith(STATES)}
        ahead = slot.name in producers and not isinstance(slot.node.op, Section)
        updates = slot.node.op.in_place and refs - inside - inputs <= state
        if updates or (ahead and (inside or refs & (inputs - state))):
            chosen.add(slot.name)
    return [slot for slot in slots if slot.name in chosen]


def _method_name(slots: Sequence[Slot], sides: frozenset[str], taken: frozenset[str]) -> str:
    words = [slot.node.name.partition(".")[0] for slot in slots if "." in slot.node.name]
    side = next((f"{word}_features" for word in words[:1] if word in sides), "features")
    parts = _parts(slots[-1].node.name, sides)
    options = (side, parts[-1] if len(parts) < 2 else parts[1], "_".join(parts), "features")
    return free([name for name in options if name.isidentifier()], taken.__contains__)


class _Section:
    """A common part of several programs, with its inputs and outputs in each program.

    Attributes:
        node_names: The names of the nodes of the section, by program.
        inputs: Maps each parameter of the method to the reference that each program passes. The state is passed as a
            whole, so the state is not included.
        read: Maps the label of each output to the output's reference, for the programs that read the output outside of
            the section.
        returned: Maps the label of each output to the output's reference, for the programs that compute the output.
    """

    def __init__(
        self,
        merged: Merged,
        where: Where,
        slots: Sequence[Slot],
        name: str,
        sides: frozenset[str],
        reserved: frozenset[str],
        whole: int | None,
    ) -> None:
        self.merged, self.where, self.slots, self.name = merged, where, slots, name
        self.sides, self.reserved = sides, reserved
        self.node_names = {
            variant: {slot.nodes[variant].name for slot in slots if variant in slot.nodes} for variant in where
        }
        self.inputs = self._inputs()
        if whole is not None:  # the method is called like the program that it replaces
            order = [name for name, _ in merged.variants[whole].inputs]
            places = {n: order.index(r[whole]) if r.get(whole) in order else len(order) for n, r in self.inputs.items()}
            self.inputs = {name: self.inputs[name] for name in sorted(places, key=lambda name: places[name])}
        self.read = self._outputs()
        self.returned = {label: self._computed(refs) for label, refs in self.read.items()}

    def _inputs(self) -> dict[str, dict[int, str]]:
        passed: list[dict[int, str]] = []
        for column in (column for slot in self.slots for column in slot.columns("inputs")):
            refs = {
                variant: ref
                for variant, ref in column.items()
                if node_of(ref) not in self.node_names[variant] and ref[0] not in "@$" and ref != NONE
            }
            if all(ref.startswith(STATES) for ref in refs.values()):
                continue
            while (known := next((known for known in passed if _agree(known, refs)), None)) is not None:
                passed.remove(known)
                refs = known | refs
            passed.append(refs)
        names: dict[str, dict[int, str]] = {}
        for refs in passed:
            names[free(self._input_names(refs), names.__contains__)] = refs
        return names

    def _input_names(self, passed: Mapping[int, str]) -> Sequence[str]:
        """Returns candidate names of a method parameter, most frequent first. `passed` maps the index of each program
        to the reference of the value that the program passes as the argument. For each program, the candidates are the
        name of this value in the program, and the names of the loop inputs that receive the value."""
        options: list[str] = []
        for variant, ref in passed.items():
            graph = self.merged.variants[variant]
            for node in graph.nodes:
                if isinstance(node.op, Loop) and node.name in self.node_names[variant] and ref in node.inputs[1:]:
                    options.append(node.op.names[node.inputs.index(ref, 1) - 1])
            if not ref.startswith(STATES):
                options += _names(graph, ref, self.sides)[:1]
        options = [option for option in options if option != "x" and option not in self.reserved] or ["value"]
        return sorted(options, key=lambda option: -options.count(option))

    def _outputs(self) -> dict[str, dict[int, str]]:
        values: dict[tuple[str, int], dict[int, str]] = {}
        for variant in sorted(self.where):
            graph = self.merged.variants[variant]
            read = {ref for node in graph.nodes if node.name not in self.node_names[variant] for ref in node.inputs}
            read |= {ref for _, ref in graph.outputs}
            for slot in self.slots:
                if variant in slot.nodes and not slot.node.op.in_place:
                    for j, ref in enumerate(slot.nodes[variant].outputs):
                        if ref in read:
                            values.setdefault((slot.name, j), {})[variant] = ref
        outputs: list[dict[int, str]] = []
        for refs in values.values():  # values that correspond to each other in different programs form one output
            twins = (known for known in outputs if not known.keys() & refs.keys() and self._read_alike(known, refs))
            if (twin := next(twins, None)) is not None:
                twin |= refs
            else:
                outputs.append(refs)
        names: dict[str, dict[int, str]] = {}
        for refs in outputs:
            variant, ref = next(iter(refs.items()))
            names[free(_names(self.merged.variants[variant], ref, self.sides), names.__contains__)] = refs
        return names

    def _computed(self, refs: Mapping[int, str]) -> dict[int, str]:
        computed = dict(refs)
        for column in (column for slot in self.slots for column in slot.columns("outputs")):
            if column.items() & refs.items():
                computed = column | computed
        return computed

    def _read_alike(self, refs: Mapping[int, str], others: Mapping[int, str]) -> bool:
        columns = (column.items() for slot in self.merged.slots for column in slot.columns("inputs"))
        return any(column & refs.items() and column & others.items() for column in columns)

    def bodies(self) -> list[Graph]:
        """Returns one graph per program, with the program's nodes that belong to the section."""
        bodies = []
        for variant in sorted(self.where):
            graph = self.merged.variants[variant]
            nodes = tuple(node for node in graph.nodes if node.name in self.node_names[variant])
            names = {refs[variant]: name for name, refs in self.inputs.items() if variant in refs}
            read = {ref for node in nodes for ref in node.inputs}
            inputs = tuple((name, graph.types[ref]) for ref, name in names.items())
            inputs += tuple((n, t) for n, t in graph.inputs if n.startswith(STATES) and n in read and n not in names)
            params = tuple(entry for entry in graph.params if f"@{entry[0]}" in read)
            outputs = tuple((label, refs[variant]) for label, refs in self.returned.items())
            bodies.append(rename(Graph(graph.name, inputs, params, nodes, outputs, graph.scalars), names))
        return bodies

    def stands_for(self, program: Graph) -> bool:
        """Returns whether the method can replace `program`, so that callers of `program` can call the method in the
        same way. The method must return as many results as `program`. Each input of `program` must be a parameter of
        the method that all callers pass."""
        passed = {name for name, refs in self.inputs.items() if refs.keys() == self.where}
        return len(self.read) == len(program.outputs) and {name for name, _ in program.inputs} <= passed

    def reads_itself(self, variant: int) -> bool:
        """Returns whether an argument of the call depends on a result of the call, through nodes outside of the
        section."""
        graph, section = self.merged.variants[variant], self.node_names[variant]
        rest = [node for node in graph.nodes if node.name not in section]
        ahead = needed(rest, (refs[variant] for refs in self.inputs.values() if variant in refs))
        return any(node_of(ref) in section for node in ahead for ref in node.inputs)

    def calling(self, variant: int) -> Graph:
        """Returns the program with a call in place of the section."""
        graph, section = self.merged.variants[variant], self.node_names[variant]
        passed = {name: refs.get(variant, NONE) for name, refs in self.inputs.items()}
        optional = frozenset(name for name, refs in self.inputs.items() if refs.keys() != self.where)
        keeps = any(
            (isinstance(node.op, Loop) and node.op.stateful)
            or any(ref.startswith(STATES) and ref not in passed.values() for ref in node.inputs)
            for node in graph.nodes
            if node.name in section
        )
        refs = [refs.get(variant, "") for refs in self.read.values()]
        types = tuple(graph.types[ref] if ref else TensorType((), "f32") for ref in refs)
        op = Section(self.name, tuple(passed), optional, tuple(self.read), keeps)
        call = Node(self.name, op, tuple(passed.values()), types)
        first = next(i for i, node in enumerate(graph.nodes) if node.name in section)
        rest = [node for node in graph.nodes[first:] if node.name not in section]
        ahead = needed(rest, call.inputs)  # nodes that compute the arguments of the call precede it
        nodes = (*graph.nodes[:first], *ahead, call, *(node for node in rest if node not in ahead))
        read = {ref for node in nodes for ref in node.inputs}
        inputs = tuple(entry for entry in graph.inputs if not entry[0].startswith(STATES) or entry[0] in read)
        return rename(
            replace(graph, nodes=nodes, inputs=inputs), dict(zip(refs, output_refs(self.name, len(refs)), strict=True))
        )


def _agree(refs: Mapping[int, str], others: Mapping[int, str]) -> bool:
    both = refs.keys() & others.keys()
    return bool(both) and all(refs[variant] == others[variant] for variant in both)


def _names(graph: Graph, ref: str, sides: frozenset[str]) -> Sequence[str]:
    """Returns candidate names for the value `ref`, shortest first. An input of the graph has only one candidate. The
    candidates for any other value are the label that its op gives to the output, and parts of its node's path."""
    node = graph.by_name.get(node_of(ref))
    if node is None:
        return (ref.replace(".", "_"),)
    parts, labels = _parts(node.name, sides), node.op.output_labels
    label = [labels[node.outputs.index(ref)]] if labels else []
    return (*label, *parts[1:2], parts[0], "_".join((*parts, *label)))


def _parts(name: str, sides: frozenset[str]) -> Sequence[str]:
    parts = name.split(".")
    return parts[1:] if parts[0] in sides and len(parts) > 1 else parts
