"""Rewrites the programs of a deployed model so that products with int8 weights are computed in int8."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specc.compiler import int8
from specc.compiler.blocks.init import constant
from specc.compiler.catalog import catalog
from specc.compiler.int8.finish import finished, with_unique_titles, without_dead_nodes
from specc.compiler.int8.form import Factor, Int8Form
from specc.compiler.ir.graph import Graph, Node, Op, TensorType, TypeRuleError, node_of, walk
from specc.compiler.ops.quantized import QuantizeRows, padded
from specc.compiler.ops.region import Call, Scan
from specc.compiler.passes.assign_quant import Allocation, allocation, keeping, pattern_of, stated
from specc.compiler.programs.programs import LoweringError, Parameter, Programs
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.strict import Path, Problem

STORAGE = "int8"


class Unfit(Exception):
    """Raised if a product cannot be computed in int8.

    `names` are the full names of its parameters. If `at_once` is true, all of them must have the same scheme.
    """

    def __init__(self, message: str, names: Sequence[str], at_once: bool = False) -> None:
        super().__init__(message)
        self.message, self.names, self.at_once = message, tuple(names), at_once

    def problem(self, quant: QuantSpec, schemes: Allocation) -> Problem:
        """Returns the problem to report, at the path in the spec that requests int8."""
        pattern = covering(self.names)
        if self.at_once:
            path = max((stated(quant, schemes[name]) for name in self.names), key=len)  # prefers a rule to the default
            hint = f'give all of them one scheme, by a single rule {{match: "{pattern}", ...}} or by the default'
            return Problem(path, "S312", self.message, hint)
        scheme = next(schemes[name] for name in self.names if schemes[name].integer)
        return Problem(stated(quant, scheme), "S312", self.message, keeping(scheme, pattern))


def covering(names: Sequence[str]) -> str:
    """Returns a pattern for these parameters and for parameters of the same name in other blocks."""
    blocks = [".".join("*" if word.isdigit() else word for word in name.split(".")) for name in names]
    places, last = {name.rpartition(".")[0] for name in blocks}, pattern_of(names)
    if len(places) == 1:
        return f"{places.pop()}{last[1:]}"
    sides = {place.partition(".")[0] for place in places}
    return f"{sides.pop()}.{last}" if len(sides) == 1 else last


@dataclass(frozen=True, slots=True)
class Source:
    """One product of the model. Names are full names in the model.

    Attributes:
        node: The node that contains the product.
        weight: The weight.
        bias: The bias, or "" if there is none in int8.
        read: Indices of the node's inputs that are multiplied with the weight.
        made: Indices of the node's outputs that are multiplied with the weight.
        maker: The node or input that produces the first of the inputs.
        leader: The first weight, in table order, of all products that share the scale of their input.
        part: Index of the slice of the features that the weight is multiplied with.
        parts: Number of such slices, which have equal sizes.
    """

    node: str
    weight: str
    bias: str
    read: tuple[int, ...]
    made: tuple[int, ...]
    maker: str
    leader: str
    part: int = 0
    parts: int = 1


def integer_products(programs: Programs, schemes: Allocation) -> tuple[Source, ...]:
    """Returns the products that the deployed model computes in int8, in order of the parameter table. Their inputs must
    be calibrated. `programs` are the programs before any pass that rewrites graphs."""
    by_weight: dict[str, Source] = {}
    leaders = _Leaders()
    for graph, at in sites(_deployed(programs)):
        by_value: dict[str, str] = {}
        for node in graph.nodes:
            for factor in factors_of(graph, node):
                weight = at + factor.weight[1:]
                if not schemes[weight].integer:
                    continue
                bias = at + factor.bias[1:] if factor.bias and schemes[at + factor.bias[1:]].integer else ""
                first = node.inputs[factor.read[0]]
                maker = at + node_of(first) if node_of(first) in graph.by_name else node_of(first)
                source = Source(
                    at + node.name, weight, bias, factor.read, factor.made, maker, weight, factor.part, factor.parts
                )
                by_weight.setdefault(weight, source)
                # The output of a recurrence that is fed back into it is not shared with other products.
                leaders.join(weight if factor.made else by_value.setdefault(first, weight), weight)
    order = {param.name: i for i, param in enumerate(programs.params)}
    sources = sorted(by_weight.values(), key=lambda source: order[source.weight])
    return tuple(replace(source, leader=leaders.of(source.weight, order)) for source in sources)


def quantize_products(programs: Programs, quant: QuantSpec | None) -> Programs:
    """Returns the programs of the deployed model, without training programs, with int8 products.

    Every node whose weights have an integer scheme is replaced by its int8 form. Its parameters are replaced by codes
    [N, K], offset [N] and scale [N] of each weight, and inverse [K] of each input.

    Args:
        programs: The programs, before any pass that rewrites graphs.
        quant: The quantization of the spec. If it is None, the programs are returned unchanged.

    Raises:
        LoweringError: If a parameter with an integer scheme has a reader that is not a product, or if only some of the
            blocks that share a function quantize a parameter. Lists all problems.
    """
    schemes = allocation(quant, programs.params)
    if quant is None:
        return programs
    sources = {source.weight: source for source in integer_products(programs, schemes)}
    deployed = _deployed(programs)
    places: dict[str, list[str]] = {}
    for graph, at in sites(deployed):
        places.setdefault(graph.name, []).append(at)
    problems: list[Problem] = []
    added: dict[str, Parameter] = {}
    changed: dict[str, Graph] = {}
    functions: dict[str, Graph] = {}
    for graph in deployed.graphs:
        try:
            editor = Editor(graph, tuple(places[graph.name]), schemes, sources, functions)
            changed[graph.name] = editor.run()
        except Unfit as error:
            problems.append(error.problem(quant, schemes))
            continue
        for at in places[graph.name]:
            for name, type in editor.added.items():
                added.setdefault(at + name, Parameter(at + name, _sizes(type), type.dtype, constant(0.0), STORAGE))
    params = tuple(param for param in deployed.params if not schemes[param.name].integer)
    problems += _left_over(changed, places, quant, schemes)
    if problems:
        raise LoweringError(tuple(dict.fromkeys(problems)))  # programs that share code repeat problems
    titled = {graph.name: graph for graph in with_unique_titles(changed.values())}
    return replace(
        deployed,
        params=(*params, *added.values()),
        functions=(*(titled[graph.name] for graph in deployed.functions), *functions.values()),
        programs=tuple(titled[graph.name] for graph in deployed.programs),
    )


def _deployed(programs: Programs) -> Programs:
    """Returns the programs other than training and its scores, with the functions that they call."""
    dropped = {"train", *(name for phase in programs.phases for name in (phase.train, phase.score))}
    remaining = tuple(graph for graph in programs.programs if graph.name not in dropped)
    table = {graph.name: graph for graph in programs.graphs}
    called = {graph.name for program in remaining for graph in walk(table, program)}
    functions = tuple(graph for graph in programs.functions if graph.name in called)
    whole = tuple(name for name in programs.whole if name not in dropped)
    return replace(programs, programs=remaining, functions=functions, whole=whole, phases=())


def sites(programs: Programs) -> Iterator[tuple[Graph, str]]:
    """Yields every graph with each prefix of its names at which it runs, each pair once."""
    seen: set[tuple[str, str]] = set()

    def visit(graph: Graph, at: str) -> Iterator[tuple[Graph, str]]:
        if (graph.name, at) in seen:
            return
        seen.add((graph.name, at))
        yield graph, at
        for node in graph.nodes:
            if isinstance(node.op, Call | Scan):
                yield from visit(programs.function(node.op.callee), f"{at}{node.op.at}.")

    for program in programs.programs:
        yield from visit(program, "")


def factors_of(graph: Graph, node: Node) -> tuple[Factor, ...]:
    form = _form(node)
    return form.factors(graph, node) if form is not None else ()


def _form(node: Node) -> Int8Form | None:
    forms = catalog(int8, Int8Form).values()
    return next((form for form in forms if type(node.op) is form.takes), None)


def _sizes(type: TensorType) -> tuple[int, ...]:
    return tuple(dim for dim in type.shape if isinstance(dim, int))


def _left_over(
    changed: Mapping[str, Graph], places: Mapping[str, list[str]], quant: QuantSpec, schemes: Allocation
) -> Iterator[Problem]:
    """Yields a problem for each path in the spec whose integer scheme stores parameters that a node still reads as
    floats."""
    reasons: dict[str, str] = {}
    for graph in changed.values():
        for node in graph.nodes:
            for ref in node.inputs:
                for name in [at + ref[1:] for at in places[graph.name]] if ref[0] == "@" else ():
                    if name in schemes and schemes[name].integer:
                        reasons.setdefault(name, node.op.name)
    by_place: dict[Path, list[str]] = {}
    for name in reasons:
        by_place.setdefault(stated(quant, schemes[name]), []).append(name)
    for path, names in by_place.items():
        more = f" (and {len(names) - 1} more parameters)" if len(names) > 1 else ""
        message = f"{names[0]} is int8, but it is read by {reasons[names[0]]}, which is no product{more}"
        yield Problem(path, "S312", message, keeping(schemes[names[0]], pattern_of(names)))


@dataclass
class _Leaders:
    """A union-find structure over weights that share the codes of their input."""

    above: dict[str, str] = field(default_factory=dict)

    def top(self, weight: str) -> str:
        while (upper := self.above.setdefault(weight, weight)) != weight:
            weight = upper
        return weight

    def join(self, a: str, b: str) -> None:
        self.above[self.top(b)] = self.top(a)

    def of(self, weight: str, order: Mapping[str, int]) -> str:
        """Returns the first, in table order, of the weights that share their input's codes with `weight`."""
        top = self.top(weight)
        return min((other for other in self.above if self.top(other) == top), key=lambda name: order[name])


@dataclass
class Editor:
    """A graph whose products are being replaced. Implements `form.Editing`.

    Attributes:
        graph: The original graph.
        places: The prefixes of its names at which it runs.
        schemes: The scheme of each parameter.
        sources: The int8 products of the model, by weight.
        functions: New functions, shared by all graphs.
        added: Types of the declared constants, by name.
        types: Types of all values, original and new.
        new: New nodes, by the name of the original node before which they are inserted.
        gone: Names of the removed nodes.
        names: Ref of a removed value -> the ref that replaces it.
        shared: (ref, leader) -> refs of the codes.
    """

    graph: Graph
    places: tuple[str, ...]
    schemes: Allocation
    sources: Mapping[str, Source]
    functions: dict[str, Graph]
    added: dict[str, TensorType] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    new: dict[str, list[Node]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    shared: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    def run(self) -> Graph:
        """Returns the graph with int8 products. Raises Unfit if a product cannot be computed in int8."""
        self.types |= self.graph.types
        for node in self.graph.nodes:
            factors = factors_of(self.graph, node)
            weights = self._full(factor.weight for factor in factors)
            if node.name in self.gone or not any(self.schemes[name].integer for name in weights):
                continue
            try:
                self._take(node, factors, weights)
            except TypeRuleError as error:
                biases = self._full(factor.bias for factor in factors)
                raise Unfit(
                    error.message, [*weights, *(name for name in biases if self.schemes[name].integer)]
                ) from None
        nodes: list[Node] = []
        for node in self.graph.nodes:
            nodes += self.new.get(node.name, [])
            if node.name not in self.gone:
                nodes.append(node)
        outputs = tuple((label, self._name(ref)) for label, ref in self.graph.outputs)
        nodes = [replace(node, inputs=tuple(map(self._name, node.inputs))) for node in nodes]
        new_names = {node.name for group in self.new.values() for node in group}
        nodes = without_dead_nodes(nodes, [ref for _, ref in outputs], new_names)
        read = {ref for node in nodes for ref in node.inputs}
        params = tuple(entry for entry in self.graph.params if f"@{entry[0]}" in read)
        params += tuple(self.added.items())
        return finished(replace(self.graph, nodes=tuple(nodes), params=params, outputs=outputs))

    def _full(self, refs: Iterable[str]) -> list[str]:
        """Returns the full names of those of `refs` that are parameters, for every place at which the graph runs."""
        return [at + ref[1:] for ref in refs if ref[:1] == "@" for at in self.places]

    def _take(self, node: Node, factors: Sequence[Factor], weights: Sequence[str]) -> None:
        integer = [self.integer(factor.weight) for factor in factors]
        if not all(integer):
            message = f"{self.places[0]}{node.name} has int8 weights and others; it takes one sort"
            raise Unfit(message, weights, at_once=True)
        form = _form(node)
        assert form is not None
        self.take(form, node, factors)

    def take(self, form: Int8Form, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces one node by the nodes of its int8 form."""
        form.rewrite(self, node, factors)

    def _name(self, ref: str) -> str:
        while ref in self.names:
            ref = self.names[ref]
        return ref

    def type(self, ref: str) -> TensorType:
        return self.types[ref]

    def integer(self, ref: str) -> bool:
        if ref[0] != "@" or self.places[0] + ref[1:] not in self.schemes:
            return False
        flags = {self.schemes[at + ref[1:]].integer for at in self.places}
        if len(flags) > 1:
            message = f"{self.places[0]}{ref[1:]} is int8 in some of the blocks that share its code, not in all"
            raise Unfit(message, self._full([ref]), at_once=True)
        return flags.pop()

    def constant(self, weight: str, suffix: str, type: TensorType) -> str:
        name = f"{weight[1:]}_{suffix}"
        self.added[name] = self.types[f"@{name}"] = replace(type, storage=STORAGE)
        return f"@{name}"

    def inverse(self, weight: str) -> str:
        leader, width = self.leader(weight), self.types[weight].width
        for at in self.places:
            names = [name for name, source in self.sources.items() if source.leader == f"{at}{leader}"]
            if len({self.schemes[name].input_by_feature for name in names}) > 1:
                message = f"{names[0]} and others that share its input want one scale for it and one for each feature"
                raise Unfit(message, names, at_once=True)
        return self.constant(f"@{leader}", "inverse", TensorType((width,), "f32"))

    def input_bits(self, weight: str) -> Literal[8, 16]:
        leaders = {self.sources[at + weight[1:]].leader for at in self.places}
        names = [name for name, source in self.sources.items() if source.leader in leaders]
        widths = {self.schemes[name].input_bits for name in names}
        if len(widths) > 1:
            message = f"{names[0]} and others that share its input or its code want it in 8 bits and in 16"
            raise Unfit(message, names, at_once=True)
        return widths.pop()

    def leader(self, weight: str) -> str:
        leaders = {self.sources[at + weight[1:]].leader.removeprefix(at) for at in self.places}
        if len(leaders) > 1:
            raise TypeRuleError(f"{self.places[0]}{weight[1:]} shares its input with other products elsewhere")
        return leaders.pop()

    def codes(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        leader = self.leader(weight)
        if (ref, leader) not in self.shared:
            self.shared[ref, leader] = self.coded(ref, weight, before)
        return self.shared[ref, leader]

    def coded(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        """Adds the nodes that compute the codes of a value. Returns their refs."""
        width, inputs = self.types[ref].width, (ref, self.inverse(weight))
        assert isinstance(width, int)
        names = (f"{weight[1:]}_input", f"{weight[1:]}_second")[: self.input_bits(weight) // 8]
        return tuple(
            self.add_op(name, QuantizeRows(padded(width), bool(i)), inputs, before) for i, name in enumerate(names)
        )

    def add(self, node: Node, at: Node) -> str:
        node.op.infer([self.types[ref] for ref in node.inputs[: node.op.arity or len(node.inputs)]])
        self.new.setdefault(at.name, []).append(node)
        self.types |= zip(node.outputs, node.types, strict=True)
        return node.name

    def add_op(self, name: str, op: Op, inputs: Sequence[str], at: Node) -> str:
        return self.add(Node(name, op, tuple(inputs), op.infer([self.types[ref] for ref in inputs])), at)

    def function(self, graph: Graph) -> str:
        if self.functions.setdefault(graph.name, graph) != graph:
            raise TypeRuleError(f"two functions are named {graph.name}")
        return graph.name

    def taken(self, old: Node) -> bool:
        return old.name in self.gone

    def replace(self, old: Node, *refs: str) -> None:
        self.gone.add(old.name)
        self.names |= {a: b for a, b in zip(old.outputs, refs, strict=False) if a != b}
