"""The result of lowering a spec: programs, functions and fused groups over one parameter table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from specc.compiler.expr import KEEPS, Keep
from specc.compiler.ir.graph import Graph, Named, Node, node_of, retyped, walk
from specc.compiler.ir.types import COMPUTE, Dim, TensorType, TypeRuleError
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.programs.init import Init
from specc.compiler.records import record
from specc.compiler.strict import Path, Problem


class LoweringError(Exception):
    """Raised if a spec has valid fields but does not describe a valid model. `problems` contains the spec paths and
    the reasons."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


@contextmanager
def refused_at(path: Path, hint: str, related: tuple[tuple[str, Path], ...] = ()) -> Iterator[None]:
    """A context manager that reports a TypeRuleError as a problem of the spec at `path`.

    Args:
        path: The spec path.
        hint: How to fix the error.
        related: Pairs (note, path) of other places in the spec that the error shows.

    Raises:
        LoweringError: If the body raises TypeRuleError.
    """
    try:
        yield
    except TypeRuleError as error:
        raise LoweringError((Problem(path, "S301", error.message, hint, related),)) from None


@record
class Parameter:
    """One learned tensor. The optimizer stores the tensor in f32, and programs read the tensor in `dtype`.

    Attributes:
        name: The name in checkpoints, rules and reports.
        shape: The dims of the tensor.
        dtype: The dtype in which programs read the parameter.
        init: The initialization.
        storage: The format in which the deployed model stores the parameter. Empty if the parameter is not quantized.
        optimizer: The index into `train.optimizers`. None until an optimizer is assigned.
        training: Whether only training programs read the parameter. If so, artifacts do not contain the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    init: Init
    storage: str = ""
    optimizer: int | None = None
    training: bool = False

    @property
    def count(self) -> int:
        return prod(self.shape)


@record
class Group:
    """A fused group of nodes.

    Attributes:
        name: The name of the group.
        scope: The prefix of the names of the group's nodes.
        members: The names of the nodes that the group replaces.
        forward: The forward graph, whose nodes may have epilogues.
        backward: The backward graph, whose nodes may have epilogues. Empty if no gradient flows through the group.
        saved: The values of `forward` that `backward` reads in addition to the incoming gradients.
        keep: The save choice: the kind of value that the forward pass saves for the backward pass.
        others: A copy of the group for each of the other save choices. The plan selects this group or one of the
            copies.
        chunks: The number of chunks of rows, which are computed one after another. With several chunks, the gradients
            of a chunk are computed right after the results of this chunk. Intermediate values then exist for one chunk
            at a time.
        results: The number of results. The results are the first outputs of `forward`, and their gradients are the
            first inputs of `backward`.
    """

    name: str
    scope: str
    members: tuple[str, ...]
    forward: Graph
    backward: Graph
    saved: tuple[str, ...]
    keep: Keep = KEEPS[0]
    others: tuple["Group", ...] = ()
    chunks: int = 1
    results: int = 1

    @property
    def inlined(self) -> bool:
        """Whether generated code contains the nodes of the group in place of a call of the group. This holds if the
        group has no backward pass and only one chunk."""
        return not self.backward.outputs and self.chunks == 1

    @property
    def takes_rows(self) -> bool:
        """Whether the group accepts rows that are flattened to one dim. This holds if the group has a matrix product
        that does not mix tokens."""
        nodes = (*self.forward.nodes, *self.backward.nodes)
        return any(node.op.matrix and not node.op.mixes_tokens for node in nodes)


@record
class Phase:
    """A phase of a training run.

    Attributes:
        until: The fraction of the run at which the phase ends, from 0 to 1.
        train: The name of the program that trains the model.
        score: The name of the program that scores the model.
        rests: The names of the parameters that neither `train` nor `score` reads.
        rounds: Whether `train` fake-quantizes the inputs of products, as in the deployed model. If so, the weights must
            also be fake-quantized in this phase.
        writes: The programs that compute decoder inputs without teacher forcing. The first program encodes the source,
            and the second program appends one token to the target.
    """

    until: float
    train: str
    score: str
    rests: tuple[str, ...] = ()
    rounds: bool = False
    writes: tuple[str, str] = ("encode", "extend")


@record
class DerivedWeight:
    """A matrix that a block computes from its parameters alone.

    Attributes:
        at: The path of the block.
        method: The name of the block's method that computes the matrix.
        params: The names of the parameters that the method reads.
        shape: The dims of the matrix.
        dtype: The dtype in which programs read the matrix.
    """

    at: str
    method: str
    params: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        return prod(self.shape)


class Rewriting(NamedTuple):
    """The effect of a pass on some nodes of the spec, or the reason why the pass did not rewrite these nodes.

    Attributes:
        step: the name of the pass.
        nodes: the paths of the nodes, with `*` in place of block numbers.
        text: the effect of the pass. Empty if the pass did not rewrite the nodes.
        refusal: the reason why the pass did not rewrite the nodes. Empty if the pass rewrote the nodes.
    """

    step: str
    nodes: tuple[str, ...]
    text: str = ""
    refusal: str = ""


@record
class Programs:
    """All programs of a model.

    A function has a name such as `block.forward`: a class and a method. A call runs a function at a path. The path is
    the prefix of the names of the function's parameters and nodes.

    Attributes:
        name: The name of the model.
        params: The parameters.
        functions: The functions that programs call.
        programs: The programs.
        places: Pairs (prefix, path). The part of the spec at `path` creates the nodes whose names begin with `prefix`.
        whole: The names of the programs that read whole sequences at once.
        groups: The fused groups.
        phases: The phases of a training run, in order. After the last phase, the run continues with the programs
            `train` and `score`.
        context: The maximum number of tokens of a sequence. None if unknown.
        buffers: Tensors that programs read but no optimizer updates, such as the inverse scales of quantized inputs.
        constants: The constants of the spec's formulas: a name for generated code, the value, and the formula.
        sizes: The named dims: the name, the size, and a description.
        recomputed: The functions whose values are not stored, because the backward pass recomputes them.
        derived: The functions that compute matrices of blocks from parameters alone. Training calls each function once
            per step.
        rewritings: For each pass that rewrites only some nodes: the effects, and the reasons why the pass did not
            rewrite the other nodes.
    """

    name: str
    params: tuple[Parameter, ...]
    functions: tuple[Graph, ...]
    programs: tuple[Graph, ...]
    places: tuple[tuple[str, Path], ...]
    whole: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    phases: tuple[Phase, ...] = ()
    context: int | None = None
    buffers: tuple[Named, ...] = ()
    constants: tuple[tuple[str, float, str], ...] = ()
    sizes: tuple[tuple[str, int, str], ...] = ()
    recomputed: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    rewritings: tuple[Rewriting, ...] = ()

    @property
    def stored(self) -> tuple[Parameter, ...]:
        """The parameters that artifacts contain."""
        return tuple(param for param in self.params if not param.training)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return self.programs + self.functions

    @cached_property
    def callers(self) -> Mapping[str, tuple[str, ...]]:
        """Maps the name of each group to the names of the graphs that run the group."""
        callers: dict[str, dict[str, None]] = {group.name: {} for group in self.groups}
        for graph in self.graphs:
            for node in graph.nodes:
                if isinstance(node.op, Fused):
                    callers[node.op.group][graph.name] = None
        return {name: tuple(graphs) for name, graphs in callers.items()}

    @cached_property
    def call_paths(self) -> Mapping[str, tuple[str, ...]]:
        """Maps the name of each called function to the paths of its calls."""
        paths: dict[str, list[str]] = {}
        for node in (node for program in self.programs for node in program.nodes):
            if isinstance(node.op, Call | Scan):
                paths.setdefault(node.op.callee, []).append(node.op.at)
        for function in self.functions:
            for node in function.nodes:
                if isinstance(node.op, Call):  # a function that is a part of the calling function runs at the same path
                    paths.setdefault(node.op.callee, []).extend(paths.get(function.name, ()))
        return {name: tuple(at) for name, at in paths.items()}

    @property
    def derived_weights(self) -> tuple[DerivedWeight, ...]:
        """The derived weights of all blocks. Training computes each of these matrices once per step."""
        return tuple(
            DerivedWeight(
                at, name.partition(".")[2], tuple(f"{at}.{param}" for param, _ in function.params), shape, type.dtype
            )
            for name in self.derived
            for function in [self.function(name)]
            for type in [function.types[function.outputs[0][1]]]
            for shape in [tuple(dim for dim in type.shape if isinstance(dim, int))]
            for at in dict.fromkeys(self.call_paths[name])
        )

    def rewritten(self, change: Callable[[Graph], Graph]) -> "Programs":
        """Returns the programs with `change` applied to all programs and functions, but not to groups."""
        return replace(self, programs=tuple(map(change, self.programs)), functions=tuple(map(change, self.functions)))

    def called_from(self, graphs: Sequence[Graph]) -> tuple[Graph, ...]:
        """Returns the functions that `graphs` call, directly or through other functions."""
        table = {graph.name: graph for graph in self.graphs}
        called = {graph.name for start in graphs for graph in walk(table, start)}
        return tuple(graph for graph in self.functions if graph.name in called)

    def program(self, name: str) -> Graph:
        return next(graph for graph in self.programs if graph.name == name)

    def function(self, name: str) -> Graph:
        return next(graph for graph in self.functions if graph.name == name)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def place(self, node: str) -> Path:
        """Returns the spec path of the part that created a node: the path in `places` with the longest prefix of the
        node's name. If no prefix matches, returns the path of the model."""
        paths = [(len(prefix), path) for prefix, path in self.places if node == prefix or node.startswith(f"{prefix}.")]
        return max(paths)[1] if paths else ("model",)


def in_dtype(programs: Programs, dtype: str) -> Programs:
    """Returns the programs with `dtype` in place of `COMPUTE`, the placeholder of the compute dtype."""

    def change(type: TensorType) -> TensorType:
        return TensorType(type.shape, dtype, type.storage) if type.dtype == COMPUTE else type

    params = (replace(p, dtype=dtype) if p.dtype == COMPUTE else p for p in programs.params)
    return replace(programs.rewritten(lambda graph: retyped(graph, change)), params=tuple(params))


def flatten(programs: Programs, graph: Graph, groups: bool = True, at: str = "", derived: bool = True) -> Graph:
    """Returns `graph` with every call replaced by the nodes of the called function. The full name of such a node begins
    with the path of the call. Loops over time are not expanded.

    If a call at the path PATH passes a scalar `name`, the returned graph refers to the scalar as `$PATH.name`. The
    function `scalar_values` returns the values of the scalars.

    Args:
        programs: The programs with the functions and groups.
        graph: The program or function to flatten.
        groups: If true, every fused group is replaced by its nodes. Otherwise, only fused groups without a gradient are
            replaced.
        at: The path of the part of the model that runs `graph`, such as `blocks.0`. Names of nodes and parameters begin
            with this path. Empty for a whole program.
        derived: If true, calls of functions that compute derived weights are replaced too. Otherwise, derived weights
            are parameters of the returned graph.
    """
    nodes, outputs = _inlined(programs, graph, groups, at, derived=derived)
    params = (*((p.name, TensorType(p.shape, p.dtype, p.storage)) for p in programs.params), *programs.buffers)
    if not derived:
        params += tuple((f"{w.at}.{w.method}", TensorType(w.shape, w.dtype)) for w in programs.derived_weights)
    scalars = tuple(dict.fromkeys(ref[1:] for node in nodes for ref in node.inputs if ref.startswith("$")))
    return Graph(graph.name, graph.inputs, params, nodes, outputs, scalars)


def read_by(programs: Programs, name: str) -> frozenset[str]:
    """Returns the names of the parameters that the program `name` reads."""
    nodes = flatten(programs, programs.program(name)).nodes
    return frozenset(ref[1:] for node in nodes for ref in node.inputs if ref.startswith("@"))


def scalar_values(graph: Graph) -> Mapping[str, float]:
    """Returns the values of the scalars that the calls in `graph` pass. The key of a scalar `name` is `PATH.name`,
    where PATH is the path of the call that passes the scalar."""
    calls = [(node.op.at, node.op.scalars) for node in graph.nodes if isinstance(node.op, Call)]
    return {f"{at}.{name}": value for at, scalars in calls for name, value in scalars}


def _inlined(
    programs: Programs, graph: Graph, groups: bool, at: str = "", calls: bool = True, derived: bool = True
) -> tuple[tuple[Node, ...], tuple[tuple[str, str], ...]]:
    """Returns the nodes of `graph`, with full names, and the outputs. A fused group is replaced by its nodes, and a
    call by the nodes of the called function.

    Args:
        programs: The programs with the functions and groups.
        graph: The graph to inline.
        groups: Whether to replace every fused group; see `flatten`.
        at: The path of the part of the model that runs `graph`, such as `blocks.0`. Names of nodes and parameters begin
            with this path. Empty for a whole program.
        calls: Whether to replace calls.
        derived: Whether to replace calls of functions that compute derived weights; see `flatten`.
    """
    nodes: list[Node] = []

    def inline(
        graph: Graph, at: str, run: str, values: dict[str, str], dims: Mapping[Dim, Dim], region: str = ""
    ) -> list[str]:
        """Adds the nodes of `graph` to the result. Returns the references of the outputs of `graph`.

        Names of parameters begin with `at`, and names of nodes with `run`. `values` maps references to their
        replacements, and `dims` maps dims, such as T to S in an encoder. `region` becomes the attribute `region` of the
        nodes.
        """
        prefix, scope = (f"{name}." if name else "" for name in (run, at))

        def place(ref: str) -> str:
            return values.get(ref, f"{ref[0]}{scope}{ref[1:]}" if ref[0] in "@$" else ref)

        ran: set[str] = set()
        for node in graph.nodes:
            inputs = tuple(map(place, node.inputs))
            if isinstance(node.op, Call) and calls and not derived and node.op.callee in programs.derived:
                results = [f"@{scope}{node.op.callee.partition('.')[2]}"]
            elif isinstance(node.op, Call) and calls:
                callee = programs.function(node.op.callee)
                arguments = {name: ref for (name, _), ref in zip(callee.inputs, inputs, strict=True)}
                begins = node.name if node.op.at in ran else node.op.at  # a repeated run needs new node names
                ran |= {node.op.at} - {""}
                passed = [dims.get(dim, dim) for ref in node.inputs[:1] for dim in graph.types[ref].shape]
                dims_of_x = zip((dim for _, type in callee.inputs[:1] for dim in type.shape), passed, strict=True)
                within: dict[Dim, Dim] = {dim: other for dim, other in dims_of_x if isinstance(dim, str)}
                places = (f"{scope}{node.op.at}".rstrip("."), f"{prefix}{begins}".rstrip("."))
                again = f"{prefix}{node.name}" if callee.name in programs.recomputed else ""
                results = inline(callee, *places, arguments, within, region or again)
            elif isinstance(node.op, Fused) and (groups or programs.group(node.op.group).inlined):
                forward = programs.group(node.op.group).forward
                arguments = {name: ref for (name, _), ref in zip(forward.inputs, inputs, strict=True)}
                results = inline(forward, at, run, arguments, dims, region)
            else:
                members = tuple(f"{prefix}{member}" for member in node.members)
                types = tuple(type.with_shape(*(dims.get(dim, dim) for dim in type.shape)) for type in node.types)
                nodes.append(Node(f"{prefix}{node.name}", node.op, inputs, types, node.epilogue, members, region))
                results = list(nodes[-1].outputs)
            values |= zip(node.outputs, results, strict=False)
        return [place(ref) for _, ref in graph.outputs]

    outputs = inline(graph, at, at, {name: name for name, _ in graph.inputs}, {})
    return tuple(nodes), tuple((label, ref) for (label, _), ref in zip(graph.outputs, outputs, strict=True))


def class_name(name: str) -> str:
    """Returns the name of a class in generated code, such as `FusedMlp` for `fused_mlp`."""
    return "".join(word.capitalize() for word in name.split("_"))


def group_functions(programs: Programs) -> Mapping[str, str]:
    """Returns the function name of each group, by the group's name.

    Groups with the same computation, such as the rotations of q and of k, share one function. The name of a shared
    function consists of the names of the members of the first group that uses the function. If that name is taken, the
    function has the name of this first group.
    """
    shared: dict[object, list[Group]] = {}
    for group in programs.groups:
        shared.setdefault(_computation(group), []).append(group)
    names: dict[str, str] = {}
    for groups in shared.values():
        name = groups[0].name
        if len(groups) > 1:
            work = "_".join(("fused", *(member.rpartition(".")[2] for member in groups[0].members)))
            name = work if work not in {*names.values(), *(group.name for group in programs.groups)} else name
        names |= {group.name: name for group in groups}
    return names


def _computation(group: Group) -> object:
    """Returns a key that is equal for groups with the same computation.

    The key contains the names of saved values, but not the names of nodes and inputs.
    """
    graphs: list[object] = []
    for graph in (group.forward, group.backward):
        names = {name: f"{graph is group.forward}{i}" for i, (name, _) in enumerate(graph.inputs)}
        for i, node in enumerate(graph.nodes):
            names |= {ref: f"n{i}:{j}" for j, ref in enumerate(node.outputs)}
        nodes = [(n.op, n.epilogue, tuple(names.get(r, r) for r in n.inputs), n.types) for n in graph.nodes]
        outputs = [names.get(ref, ref) for _, ref in graph.outputs]
        graphs.append((tuple(nodes), tuple(type for _, type in graph.inputs), tuple(outputs)))
    return tuple(graphs), group.saved, group.chunks


def without_scoring_groups(programs: Programs, graph: Graph) -> Graph:
    """Returns a copy of `graph` in which each fused group without a backward pass is replaced by the nodes of the
    group. A group with several chunks is kept."""
    nodes, outputs = _inlined(programs, graph, groups=False, calls=False)
    return replace(graph, nodes=nodes, outputs=outputs)


def owner(ref: str) -> str:
    """Returns the class in the name of a function. For example, the class in `block.forward` is `block`."""
    return node_of(ref).partition(".")[0]
