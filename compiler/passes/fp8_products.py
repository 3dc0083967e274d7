"""Replaces linear layers of training programs by layers that multiply 8-bit floats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, walk
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.fp8 import FACTORS, HISTORY, STORAGE, Fp8Linear
from specc.compiler.ops.linear import Linear, MatrixProduct
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Call, calling
from specc.compiler.pattern import matches, of_all_blocks
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.spec.precision import Fp8Spec
from specc.compiler.spec.train import TrainSpec
from specc.compiler.strict import Path, Problem
from specc.compiler.targets import Target

SUFFIX = "_fp8"  # the name suffix of functions that only training runs, and of buffers with scales


def fp8_products(programs: Programs, train: TrainSpec, target: Target) -> Programs:
    """Makes training programs multiply 8-bit floats in the matrix products that `train.precision.fp8` selects. Returns
    the new programs.

    Programs for scoring and decoding still multiply in the compute dtype, because a scale depends on all tokens of a
    tensor, including later tokens. If a training program shares a function with another program, the training program
    calls a changed copy of the function. Programs that fake-quantize inputs are unchanged.

    Args:
        programs: The programs, before fusion.
        train: The training spec.
        target: The target.

    Raises:
        LoweringError: If a rule matches no product with an 8-bit form, or does not match all products that share
            generated code. Also if the target cannot compute a product in 8 bits.
    """
    rules = train.precision.fp8
    if not rules:
        return programs
    names = {"train", *(phase.train for phase in programs.phases if not phase.rounds)}
    trained = [graph for graph in programs.programs if graph.name in names]
    table = {graph.name: graph for graph in programs.graphs}
    places: dict[str, dict[str, None]] = {}  # the path prefixes at which each graph runs
    for program in trained:
        places.setdefault(program.name, {})[""] = None
        for node in program.nodes:
            if isinstance(node.op, Call):
                places.setdefault(node.op.callee, {})[f"{node.op.at}."] = None
    problems = [*_unable(target)]
    editor = _Products(rules, places)
    changed = {name: editor.graph(table[name]) for name in places}
    problems += editor.problems
    for i, rule in enumerate(rules):
        if i not in editor.used:
            message = f"`{rule.match}` matches no matrix product of training that has an 8-bit form"
            hint = f"the products with an 8-bit form are {', '.join(list(editor.products)[:8])}"
            matched = dict.fromkeys(name for path, name in editor.others.items() if matches(rule.match, path))
            if matched:
                hint = f"there is no 8-bit form of {', '.join(list(matched)[:8])}; {hint}"
            problems.append(Problem(_path(i, "match"), "S294", message, hint))
    if problems:
        raise LoweringError(tuple(problems))
    functions = {graph.name: graph for graph in programs.functions}
    copies = {name: f"{name}{SUFFIX}" for name, graph in changed.items() if name in functions and graph != table[name]}
    functions |= {copy: replace(changed[name], name=copy) for name, copy in copies.items()}
    graphs = tuple(
        replace(changed[graph.name], nodes=tuple(calling(node, copies) for node in changed[graph.name].nodes))
        if graph.name in names
        else graph
        for graph in programs.programs
    )
    called = {graph.name for program in graphs for graph in walk({**table, **functions}, program)}
    return replace(
        programs,
        programs=graphs,
        functions=tuple(graph for name, graph in functions.items() if name in called),
        buffers=(*programs.buffers, *editor.buffers.items()),
    )


def _path(rule: int, field: str) -> Path:
    return "train", "precision", "fp8", rule, field


def _unable(target: Target) -> Iterator[Problem]:
    if "gpu" in target.features and "fp8_mma" not in target.features:
        message = f"{target.name} ({target.title}) cannot multiply 8-bit floats"
        yield Problem(
            _path(0, "match"), "S401", message, "remove `fp8`, or the target; sm89 and later multiply 8-bit floats"
        )


def _wide(graph: Graph, node: Node) -> bool:
    """Returns whether a linear layer multiplies in f32 for every compute dtype, as the router of a mixture of experts
    does."""
    cast = graph.by_name.get(node.inputs[0])
    return cast is not None and isinstance(cast.op, Pointwise) and cast.op.dtype == "f32"


class _Products:
    """Rewrites the linear layers of graphs.

    Attributes:
        products: The paths of all linear layers that were visited so far, with `*` for the index of a block.
        others: Maps the path of each product without an 8-bit form to its path with `*` for the index of a block.
        used: The indices of the rules that match a linear layer.
        buffers: The types of the scales, by name.
        problems: The problems so far.
    """

    def __init__(self, rules: Sequence[Fp8Spec], places: Mapping[str, Mapping[str, None]]) -> None:
        self._rules, self._places = rules, places
        self.products: dict[str, None] = {}
        self.others: dict[str, str] = {}
        self.used: set[int] = set()
        self.buffers: dict[str, TensorType] = {}
        self.problems: list[Problem] = []

    def graph(self, graph: Graph) -> Graph:
        params = dict(graph.params)
        nodes = tuple(self._node(graph, node, params) for node in graph.nodes)
        return graph if nodes == graph.nodes else replace(graph, nodes=nodes, params=tuple(params.items()))

    def _node(self, graph: Graph, node: Node, params: dict[str, TensorType]) -> Node:
        weight = node.inputs[1] if isinstance(node.op, MatrixProduct) else ""
        if weight[:1] != "@":
            return node
        paths = [at + node.name for at in self._places[graph.name]]
        names = [".".join("*" if word.isdigit() else word for word in path.split(".")) for path in paths]
        if not isinstance(node.op, Linear) or _wide(graph, node):
            self.others |= zip(paths, names, strict=True)
            return node
        self.products |= dict.fromkeys(names)
        chosen = [next((i for i, rule in enumerate(self._rules) if matches(rule.match, path)), None) for path in paths]
        if (first := next((i for i in chosen if i is not None), None)) is None:
            return node
        self.used |= {i for i in chosen if i is not None}
        if len(set(chosen)) > 1:
            other = next(path for path, i in zip(paths, chosen, strict=True) if i != first)
            pattern, covered = self._rules[first].match, paths[chosen.index(first)]
            message = f"`{pattern}` matches {covered}, but not {other}; both run the same generated code"
            hint = f"match all blocks that run this code, e.g. `{of_all_blocks(covered)}`"
            self.problems.append(Problem(_path(first, "match"), "S303", message, hint))
            return node
        rule = self._rules[first]
        state: tuple[str, ...] = ()
        if rule.scaling == "delayed":
            name, type = f"{weight[1:]}{SUFFIX}", TensorType((HISTORY + rule.steps, len(FACTORS)), "f32", STORAGE)
            params[name], state = type, (f"@{name}",)
            self.buffers |= {at + name: type for at in self._places[graph.name]}
        op = Fp8Linear(rule.scale == "row", rule.scaling == "delayed")
        return replace(node, op=op, inputs=(*node.inputs, *state))
