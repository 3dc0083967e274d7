"""The result of lowering a spec: programs, functions and fused groups over one parameter table."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from specc.compiler.expr import KEEPS, Keep
from specc.compiler.ir.graph import Graph, Named, Node, node_of, retyped
from specc.compiler.ir.types import COMPUTE, Dim, TensorType, TypeRuleError
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.programs.init import Init
from specc.compiler.strict import Path, Problem


class LoweringError(Exception):
    """Raised if a spec is valid in itself but does not describe a valid model. `problems` contains the spec paths and
    the reasons."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


@contextmanager
def refused_at(path: Path, hint: str, related: tuple[tuple[str, Path], ...] = ()) -> Iterator[None]:
    """A context manager that reports a TypeRuleError as a problem of the part of the spec at `path`.

    Args:
        path: the spec path.
        hint: how to fix it.
        related: pairs (note, path) of other places in the spec that the error also shows.

    Raises:
        LoweringError: if the body raises TypeRuleError.
    """
    try:
        yield
    except TypeRuleError as error:
        raise LoweringError((Problem(path, "S301", error.message, hint, related),)) from None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One learned tensor. The optimizer owns it in f32; programs read it in `dtype`.

    Attributes:
        name: the name in checkpoints, rules and reports.
        shape: the dims of the tensor.
        dtype: the dtype in which programs read it.
        init: the initialization.
        storage: the format in which the deployed model stores it; empty if it is not quantized.
        optimizer: the index into `train.optimizers`; None until an optimizer is assigned.
        training: whether only training programs read it. Artifacts do not contain such a parameter.
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


@dataclass(frozen=True, slots=True)
class Group:
    """A fused group of nodes.

    Attributes:
        name: the name of the group.
        scope: the prefix of the names of its nodes.
        members: the names of the nodes that the group replaces.
        forward: the forward graph, whose nodes have epilogues.
        backward: the backward graph, whose nodes have epilogues; empty if no gradient flows through the group.
        saved: the values of `forward` that `backward` reads in addition to the incoming gradient.
        keep: the kind of value that the forward saves for the backward.
        others: the same group with the other save choices. The plan selects one.
        chunks: the number of chunks of rows that are computed one after another. With more than one chunk, the
            gradients of a chunk are computed right after its results. Only the intermediate values of one chunk then
            exist at a time.
        results: the number of results. The results are the first outputs of `forward`, and their gradients are the
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
        """Whether generated code contains the nodes of the group in place of a call, because the group has no backward
        pass and is not computed in chunks."""
        return not self.backward.outputs and self.chunks == 1

    @property
    def takes_rows(self) -> bool:
        """Whether the group accepts rows that are flattened to one dim. Such a group has a matrix product and does not
        mix tokens."""
        nodes = (*self.forward.nodes, *self.backward.nodes)
        return any(node.op.matrix and not node.op.mixes_tokens for node in nodes)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a training run. It ends after the fraction `until` of the run.

    Attributes:
        until: the fraction of the run at which the phase ends, from 0 to 1.
        train: the name of the program that trains the model.
        score: the name of the program that scores the model.
        rests: the names of the parameters that neither `train` nor `score` reads.
        rounds: whether `train` fake-quantizes the inputs of products, as the deployed model does. The weights must then
            be fake-quantized too.
        writes: the programs that compute decoder inputs without teacher forcing: the first encodes the source, and the
            second extends the target by one token.
    """

    until: float
    train: str
    score: str
    rests: tuple[str, ...] = ()
    rounds: bool = False
    writes: tuple[str, str] = ("encode", "extend")


@dataclass(frozen=True, slots=True)
class DerivedWeight:
    """A matrix that a block computes only from its parameters.

    Attributes:
        at: the path of the block.
        method: the name of the block's method that computes the matrix.
        params: the names of the parameters that it reads.
        shape: the dims of the matrix.
        dtype: the dtype in which programs read it.
    """

    at: str
    method: str
    params: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The effect of a pass on some nodes of the spec, or the reason why the pass did not rewrite them.

    Attributes:
        step: the name of the pass.
        nodes: the paths of the nodes, with `*` in place of block numbers.
        text: the effect of the pass; empty if it did not rewrite the nodes.
        refusal: the reason why the pass did not rewrite the nodes; empty if it did.
    """

    step: str
    nodes: tuple[str, ...]
    text: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Programs:
    """All programs of a model. A function has a name such as `block.forward`: a class and a method. A call runs a
    function at a path. The path is the prefix of the names of the function's parameters and nodes.

    Attributes:
        name: the name of the model.
        params: the parameters.
        functions: the functions that programs call.
        programs: the programs.
        places: pairs of a prefix of node names and the spec path of the part that created these nodes.
        whole: the names of the programs that read whole sequences at once.
        groups: the fused groups.
        phases: the phases of a training run, in order. After the last phase, the run continues with `train` and
            `score`.
        context: the maximum number of tokens of a sequence; None if unknown.
        buffers: tensors that programs read but no optimizer owns: the inverse scales of quantized inputs.
        constants: the values of the spec's formulas: triples of a name for generated code, the value, and the formula.
        sizes: the named dims: triples of the name, the size, and a description.
        recomputed: the functions whose values the backward pass recomputes instead of reading them from memory.
        derived: the functions of blocks that compute matrices only from parameters. Training runs each once per step.
        layers: the value of `layers` in formulas: the number of blocks (in an encoder-decoder, of both sides together);
            1 if there are no blocks.
        rewritings: the effects of passes that select nodes, and the reasons for nodes that they did not rewrite.
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
    layers: int = 1
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
        """Maps the name of each group to the names of the graphs that run it."""
        callers: dict[str, dict[str, None]] = {group.name: {} for group in self.groups}
        for graph in self.graphs:
            for node in graph.nodes:
                if isinstance(node.op, Fused):
                    callers[node.op.group][graph.name] = None
        return {name: tuple(graphs) for name, graphs in callers.items()}

    @cached_property
    def call_paths(self) -> Mapping[str, tuple[str, ...]]:
        """Maps the name of each function that programs call to the paths at which they call it."""
        paths: dict[str, list[str]] = {}
        for node in (node for program in self.programs for node in program.nodes):
            if isinstance(node.op, Call | Scan):
                paths.setdefault(node.op.callee, []).append(node.op.at)
        for function in self.functions:
            for node in function.nodes:
                if isinstance(node.op, Call):  # a function that is a part of this one runs at the same path
                    paths.setdefault(node.op.callee, []).extend(paths.get(function.name, ()))
        return {name: tuple(at) for name, at in paths.items()}

    @property
    def derived_weights(self) -> tuple[DerivedWeight, ...]:
        """The derived weights of all blocks, which training computes once per step."""
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

    def program(self, name: str) -> Graph:
        return next(graph for graph in self.programs if graph.name == name)

    def function(self, name: str) -> Graph:
        return next(graph for graph in self.functions if graph.name == name)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def place(self, node: str) -> Path:
        """Returns the spec path of the part that created a node: the entry of `places` with the longest prefix of the
        name, or the path of the model if there is no entry."""
        paths = [(len(prefix), path) for prefix, path in self.places if node == prefix or node.startswith(f"{prefix}.")]
        return max(paths)[1] if paths else ("model",)


def in_dtype(programs: Programs, dtype: str) -> Programs:
    """Replaces COMPUTE, the placeholder for the compute dtype, with `dtype`. Returns the new programs."""

    def change(type: TensorType) -> TensorType:
        return TensorType(type.shape, dtype, type.storage) if type.dtype == COMPUTE else type

    params = (replace(p, dtype=dtype) if p.dtype == COMPUTE else p for p in programs.params)
    functions, graphs = (tuple(retyped(g, change) for g in group) for group in (programs.functions, programs.programs))
    return replace(programs, params=tuple(params), functions=functions, programs=graphs)


def flatten(programs: Programs, graph: Graph, groups: bool = True, at: str = "", derived: bool = True) -> Graph:
    """Returns `graph`, in which every call is replaced with the nodes of its function, under full names. Loops over
    time are not expanded.

    The scalar `name` that a call at the path PATH passes becomes `$PATH.name`; `scalar_values` returns its value.

    Args:
        programs: the programs that hold the functions and groups.
        graph: the program or function to flatten.
        groups: whether to expand every fused group. If false, only groups without a gradient are expanded.
        at: the path at which `graph` runs.
        derived: whether to expand the functions of derived weights. If false, derived weights are parameters.
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
    """Returns the value of each scalar of the flattened program `graph`, by `PATH.name`."""
    calls = [(node.op.at, node.op.scalars) for node in graph.nodes if isinstance(node.op, Call)]
    return {f"{at}.{name}": value for at, scalars in calls for name, value in scalars}


def _inlined(
    programs: Programs, graph: Graph, groups: bool, at: str = "", calls: bool = True, derived: bool = True
) -> tuple[tuple[Node, ...], tuple[tuple[str, str], ...]]:
    """Returns the nodes of `graph` under full names, with groups and calls replaced by their nodes, and its outputs.

    Args:
        programs: the programs that hold the functions and groups.
        graph: the graph to inline.
        groups: whether to expand every fused group; see `flatten`.
        at: the path at which `graph` runs.
        calls: whether to expand calls.
        derived: whether to expand the functions of derived weights; see `flatten`.
    """
    nodes: list[Node] = []

    def inline(
        graph: Graph, at: str, run: str, values: dict[str, str], dims: Mapping[Dim, Dim], region: str = ""
    ) -> list[str]:
        """Adds the nodes of `graph` and returns the references of its outputs. Names of parameters are prefixed with
        `at`, and names of nodes with `run`. `values` replaces references, and `dims` replaces dims, such as T with S in
        an encoder. `region` becomes the region of the nodes."""
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
                begins = node.name if node.op.at in ran else node.op.at  # each further run needs new node names
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
    """Returns the name of a class in generated code, e.g. `FusedMlp` for `fused_mlp`."""
    return "".join(word.capitalize() for word in name.split("_"))


def group_functions(programs: Programs) -> Mapping[str, str]:
    """Returns the name of the function that runs each group, by the group's name.

    Groups with the same computation, such as the rotation of q and the rotation of k, share one function. The function
    is named after the members of the group if the name is free.
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
    """Returns the graph with each group without a gradient replaced by the nodes of the group."""
    nodes, outputs = _inlined(programs, graph, groups=False, calls=False)
    return replace(graph, nodes=nodes, outputs=outputs)


def owner(ref: str) -> str:
    """Returns the class to which a function belongs: `block` for `block.forward`."""
    return node_of(ref).partition(".")[0]
