"""Rewrites the programs of a deployed model so that they compute products with int8 weights in int8."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from specc.compiler import int8
from specc.compiler.catalog import catalog
from specc.compiler.int8.editor import STORAGE, Editor, Factor, Source, Unfit
from specc.compiler.int8.finish import with_unique_titles
from specc.compiler.int8.form import Int8Form
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ir.types import TensorType, TypeRuleError
from specc.compiler.ops.region import Call, Scan
from specc.compiler.passes.assign_quant import Allocation, allocation, and_more, keeping, pattern_of, stated
from specc.compiler.programs.init import constant
from specc.compiler.programs.programs import LoweringError, Parameter, Programs
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.strict import Path, Problem


def integer_products(programs: Programs, schemes: Allocation) -> tuple[Source, ...]:
    """Returns the matrix products that the deployed model computes in int8, in the order of the parameter table.
    Calibration measures the range of the inputs of these products. `programs` are the programs before any pass that
    rewrites graphs."""
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
                    at + node.name, weight, bias, factor.read, factor.outputs, maker, weight, factor.part, factor.parts
                )
                by_weight.setdefault(weight, source)
                # An output that a recurrence reads again is not shared with other products.
                leaders.join(weight if factor.outputs else by_value.setdefault(first, weight), weight)
    order = {param.name: i for i, param in enumerate(programs.params)}
    sources = sorted(by_weight.values(), key=lambda source: order[source.weight])
    return tuple(replace(source, leader=leaders.of(source.weight, order)) for source in sources)


def quantize_products(programs: Programs, quant: QuantSpec | None) -> Programs:
    """Returns the programs of the deployed model, with int8 products and without training programs.

    Every node whose weights have an integer scheme is replaced by its int8 form. New parameters replace the parameters
    of the node: the codes [N, K], offset [N] and scale [N] of each weight, and the inverse scale [K] of each input.

    Args:
        programs: The programs, before any pass that rewrites graphs.
        quant: The quantization of the spec. If None, the programs are returned unchanged.

    Raises:
        LoweringError: If a node other than a matrix product reads a parameter with an integer scheme. Also if a product
            cannot be computed in int8. An example is a product whose code several blocks share, but whose weight has an
            integer scheme in only some of these blocks. The error lists all problems.
    """
    schemes = allocation(quant, programs.stored)
    if quant is None:
        return programs
    sources = {source.weight: source for source in integer_products(programs, schemes)}
    deployed = _deployed(programs)
    places = places_of(deployed)
    problems: list[Problem] = []
    added: dict[str, Parameter] = {}
    changed: dict[str, Graph] = {}
    functions: dict[str, Graph] = {}
    for graph in deployed.graphs:
        try:
            editor = Editor(graph, tuple(places[graph.name]), schemes, sources, functions)
            changed[graph.name] = rewritten(editor)
        except Unfit as error:
            problems.append(error.problem(quant, schemes))
            continue
        for at in places[graph.name]:
            for name, type in editor.added.items():
                added.setdefault(at + name, Parameter(at + name, _sizes(type), type.dtype, constant(0.0), STORAGE))
    # Parameters that only training reads, such as the parameters of the modules of a loss, have no scheme, and are not
    # deployed
    params = tuple(p for p in deployed.params if p.name in schemes and not schemes[p.name].integer)
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
    """Returns the programs without training programs, and without functions that only training programs call."""
    dropped = {"train", *(name for phase in programs.phases for name in (phase.train, phase.score))}
    remaining = tuple(graph for graph in programs.programs if graph.name not in dropped)
    functions = programs.called_from(remaining)
    whole = tuple(name for name in programs.whole if name not in dropped)
    return replace(programs, programs=remaining, functions=functions, whole=whole, phases=())


def sites(programs: Programs) -> Iterator[tuple[Graph, str]]:
    """Yields pairs (graph, path prefix). A program has the prefix "". A function occurs once per call, with the prefix
    of the call."""
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


def places_of(programs: Programs) -> Mapping[str, list[str]]:
    """Returns, for the name of each graph, the path prefixes of all calls to this graph."""
    places: dict[str, list[str]] = {}
    for graph, at in sites(programs):
        places.setdefault(graph.name, []).append(at)
    return places


def rewritten(editor: Editor, fake: bool = False) -> Graph:
    """Returns the graph of `editor` with int8 forms in place of nodes whose weights are int8.

    Args:
        editor: The editor of the graph.
        fake: If true, the graph is a training graph, and the nodes are fake-quantized instead.

    Raises:
        Unfit: If a product cannot be computed in int8.
    """
    for node in editor.graph.nodes:
        form = _form(node)
        factors = form.factors(editor.graph, node) if form is not None else ()
        weights = editor.full_names(factor.weight for factor in factors)
        if form is None or node.name in editor.gone or not any(editor.schemes[name].integer for name in weights):
            continue
        try:
            integer = [editor.integer(factor.weight) for factor in factors]
            if not all(integer):
                message = f"{editor.places[0]}{node.name} has int8 and other weights; all of them must be int8, or none"
                raise Unfit(message, weights, at_once=True)
            (form.fake_quantize if fake else form.rewrite)(editor, node, factors)
        except TypeRuleError as error:
            biases = editor.full_names(factor.bias for factor in factors)
            names = [*weights, *(name for name in biases if editor.schemes[name].integer)]
            raise Unfit(error.message, names) from None
    return editor.result()


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
    """A node may still read a parameter with an integer scheme as floats. Yields a problem for each spec path that
    requests the scheme of such a parameter. `changed` are the rewritten graphs, by name."""
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
        reader = f"{reasons[names[0]]} reads it, and only matrix products can read int8"
        message = f"{names[0]} is int8, but {reader}{and_more(names, 'this also applies to')}"
        yield Problem(path, "S312", message, keeping(schemes[names[0]], pattern_of(names)))


@dataclass
class _Leaders:
    """A union-find structure of weights. The weights of a set multiply the same int8 input."""

    above: dict[str, str] = field(default_factory=dict)

    def top(self, weight: str) -> str:
        while (upper := self.above.setdefault(weight, weight)) != weight:
            weight = upper
        return weight

    def join(self, a: str, b: str) -> None:
        self.above[self.top(b)] = self.top(a)

    def of(self, weight: str, order: Mapping[str, int]) -> str:
        """Returns the leader of `weight`: the first weight, in `order`, that multiplies the same int8 input."""
        top = self.top(weight)
        return min((other for other in self.above if self.top(other) == top), key=lambda name: order[name])
