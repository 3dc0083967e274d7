"""The result of lowering a spec: programs over one parameter table, the functions they call, and the fused groups."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specc.compiler.blocks.init import Init
from specc.compiler.expr import KEEPS, Keep
from specc.compiler.ir.graph import Dim, Graph, Named, Node, TensorType, node_of
from specc.compiler.ops.region import Call, Fused
from specc.compiler.strict import Path, Problem


class LoweringError(Exception):
    """Raised if a valid spec does not describe a valid model. `problems` hold the spec paths and the reasons."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    init: Init
    storage: str = ""
    optimizer: int | None = None

    @property
    def count(self) -> int:
        total = 1
        for dim in self.shape:
            total *= dim
        return total


@dataclass(frozen=True, slots=True)
class Group:
    """A fused group of nodes.

    Attributes:
        name: the name of the group.
        scope: the scope of its nodes.
        members: the names of the nodes of the function that it replaced.
        forward: the forward graph, whose nodes carry epilogues.
        backward: the backward graph, whose nodes carry epilogues; empty if no gradient flows through the group.
        saved: the values of `forward` that `backward` reads in addition to the incoming gradient.
        keep: the kind of value that the forward saves for the backward.
        others: the same group with the other save choices; a plan selects among them.
    """

    name: str
    scope: str
    members: tuple[str, ...]
    forward: Graph
    backward: Graph
    saved: tuple[str, ...]
    keep: Keep = KEEPS[0]
    others: tuple["Group", ...] = ()

    @property
    def takes_rows(self) -> bool:
        """True if the group accepts its rows flattened to one dim: it has a matrix product that does not mix tokens."""
        nodes = (*self.forward.nodes, *self.backward.nodes)
        return any(node.op.matrix and not node.op.mixes_tokens for node in nodes)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a training run, until the share `until` of the run is done.

    Attributes:
        until: the share of the run at which the phase ends, from 0 to 1.
        train: the program that trains the model.
        score: the program that scores the model.
        rests: the parameters that neither program reads.
        rounds: whether `train` fake-quantizes the inputs of products as the deployed model quantizes them. Its weights
            must then be fake-quantized too.
        writes: the programs that compute decoder inputs if they are not teacher-forced: one that encodes the source,
            and one that extends the target by a token.
    """

    until: float
    train: str
    score: str
    rests: tuple[str, ...] = ()
    rounds: bool = False
    writes: tuple[str, str] = ("encode", "extend")


@dataclass(frozen=True, slots=True)
class Programs:
    """All programs of a model. A function is named `class.method`, e.g. `block.forward`; calls run it at a path.

    Attributes:
        name: the name of the model.
        params: the parameters.
        functions: the functions that programs call.
        programs: the programs.
        places: pairs of a node-name prefix and the path of the part of the spec that created the node.
        whole: the names of the programs that read whole sequences at once.
        groups: the fused groups.
        phases: the phases of a training run, in order. After the last phase, the run continues with `train` and
            `score`.
        context: the maximum number of tokens of a sequence; None if unknown.
        buffers: tensors that programs read but no optimizer owns: the inverse scales of quantized inputs.
        constants: the values of the spec's formulas: a name for generated code, the value, the formula.
        sizes: the names of dims: the name, the size, the description.
        layers: the value of `layers` in formulas: the number of blocks, of both sides in an encoder-decoder; 1 if there
            are no blocks.
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
    layers: int = 1

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return self.programs + self.functions

    def program(self, name: str) -> Graph:
        return next(graph for graph in self.programs if graph.name == name)

    def function(self, name: str) -> Graph:
        return next(graph for graph in self.functions if graph.name == name)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def place(self, node: str) -> Path:
        """Returns the spec path of the longest known prefix of a node's name; the path of the model if no prefix is
        known."""
        paths = [(len(prefix), path) for prefix, path in self.places if node == prefix or node.startswith(f"{prefix}.")]
        return max(paths)[1] if paths else ("model",)


def flatten(programs: Programs, graph: Graph, groups: bool = True, at: str = "") -> Graph:
    """Returns `graph` with every call replaced by the nodes of its function, under full names. Loops over time are not
    expanded.

    Scalars that calls bind are named `$place.name`; `scalar_values` returns their values.

    Args:
        programs: the programs that hold the functions and groups.
        graph: the program or function to flatten.
        groups: whether to expand every fused group. If false, only groups without a gradient are expanded.
        at: the path at which `graph` runs.
    """
    nodes: list[Node] = []
    renamed = _inline(programs, graph, at, at, {name: name for name, _ in graph.inputs}, nodes, groups, {})
    outputs = tuple((label, renamed[ref]) for label, ref in graph.outputs)
    params = (*((p.name, TensorType(p.shape, p.dtype, p.storage)) for p in programs.params), *programs.buffers)
    scalars = tuple(dict.fromkeys(ref[1:] for node in nodes for ref in node.inputs if ref.startswith("$")))
    return Graph(graph.name, graph.inputs, params, tuple(nodes), outputs, scalars)


def read_by(programs: Programs, name: str) -> frozenset[str]:
    """Returns the names of the parameters that the program `name` reads."""
    nodes = flatten(programs, programs.program(name)).nodes
    return frozenset(ref[1:] for node in nodes for ref in node.inputs if ref.startswith("@"))


def scalar_values(graph: Graph) -> Mapping[str, float]:
    """Returns the value of each scalar of the program `graph` after flattening, by `place.name`."""
    calls = [(node.op.at, node.op.scalars) for node in graph.nodes if isinstance(node.op, Call)]
    return {f"{at}.{name}": value for at, scalars in calls for name, value in scalars}


def _inline(
    programs: Programs,
    graph: Graph,
    at: str,
    run: str,
    values: Mapping[str, str],
    nodes: list[Node],
    groups: bool,
    dims: Mapping[Dim, Dim],
) -> dict[str, str]:
    """Appends the nodes of `graph` to `nodes`, under full names, and returns the new reference of each of its values.

    Args:
        programs: the programs that hold the functions and groups.
        graph: the graph to inline.
        at: the path prefix of its parameters.
        run: the prefix of the names of its nodes.
        values: the references that replace the graph's inputs.
        nodes: the list that receives the nodes.
        groups: whether to expand every fused group; see `flatten`.
        dims: the dims that replace those of the graph, such as S for T in a function that runs in an encoder.
    """
    here = dict(values)
    prefix, scope = (f"{name}." if name else "" for name in (run, at))

    def place(ref: str) -> str:
        return here.get(ref, f"{ref[0]}{scope}{ref[1:]}" if ref[0] in "@$" else ref)

    ran: set[str] = set()
    for node in graph.nodes:
        inputs = tuple(map(place, node.inputs))
        if isinstance(node.op, Call):
            callee = programs.function(node.op.callee)
            given = {name: ref for (name, _), ref in zip(callee.inputs, inputs, strict=True)}
            begins = node.name if node.op.at in ran else node.op.at  # each further run needs new node names
            ran.add(node.op.at)
            (_, x), *_ = callee.inputs
            passed = [dims.get(dim, dim) for dim in graph.types[node.inputs[0]].shape]
            within: dict[Dim, Dim] = {
                dim: other for dim, other in zip(x.shape, passed, strict=True) if isinstance(dim, str)
            }
            place_of_callee = f"{scope}{node.op.at}", f"{prefix}{begins}"
            inner = _inline(programs, callee, *place_of_callee, given, nodes, groups, within)
            results = [inner[ref] for _, ref in callee.outputs]
        elif isinstance(node.op, Fused) and (groups or not programs.group(node.op.group).backward.outputs):
            forward = programs.group(node.op.group).forward
            given = {name: ref for (name, _), ref in zip(forward.inputs, inputs, strict=True)}
            inner = _inline(programs, forward, at, run, given, nodes, groups, dims)
            results = [inner[ref] for _, ref in forward.outputs]
        else:
            name = f"{prefix}{node.name}"
            members = tuple(f"{prefix}{member}" for member in node.members)
            types = tuple(type.with_shape(*(dims.get(dim, dim) for dim in type.shape)) for type in node.types)
            nodes.append(replace(node, name=name, inputs=inputs, members=members, types=types))
            results = list(nodes[-1].outputs)
        here |= zip(node.outputs, results, strict=False)
    return here


def class_name(name: str) -> str:
    """Returns the name of a class in generated code, e.g. `FusedMlp` for `fused_mlp`."""
    return "".join(word.capitalize() for word in name.split("_"))


def group_functions(programs: Programs) -> Mapping[str, str]:
    """Returns the name of the function that runs each group, by the group's name.

    Groups with the same computation, such as the rotation of q and that of k, share a function, which is named after
    its members if that name is free.
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
    """Returns a key of a group's computation that ignores the names of its nodes and inputs, but not those of saved
    values."""
    graphs: list[object] = []
    known: dict[str, str] = {}
    for graph in (group.forward, group.backward):
        names = {name: f"{graph is group.forward}{i}" for i, (name, _) in enumerate(graph.inputs)}
        for i, node in enumerate(graph.nodes):
            names |= {ref: f"n{i}:{j}" for j, ref in enumerate(node.outputs)}
        nodes = [(n.op, n.epilogue, tuple(names.get(r, r) for r in n.inputs), n.types) for n in graph.nodes]
        outputs = [names.get(ref, ref) for _, ref in graph.outputs]
        graphs.append((tuple(nodes), tuple(type for _, type in graph.inputs), tuple(outputs)))
        known |= names
    return tuple(graphs), group.saved


def without_scoring_groups(programs: Programs, graph: Graph) -> Graph:
    """Returns the graph with each group without a gradient replaced by its nodes. Such a group needs no function."""
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in graph.nodes:
        node = replace(node, inputs=tuple(names.get(ref, ref) for ref in node.inputs))
        group = programs.group(node.op.group) if isinstance(node.op, Fused) else None
        if group is None or group.backward.outputs:
            nodes.append(node)
            continue
        given = dict(zip((name for name, _ in group.forward.inputs), node.inputs, strict=True))
        for member in group.forward.nodes:
            nodes.append(replace(member, inputs=tuple(given.get(ref, ref) for ref in member.inputs)))
        names |= zip(node.outputs, (given.get(ref, ref) for _, ref in group.forward.outputs), strict=False)
    outputs = tuple((label, names.get(ref, ref)) for label, ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def owner(ref: str) -> str:
    """Returns the class that a function belongs to: `block` for `block.forward`."""
    return node_of(ref).partition(".")[0]
