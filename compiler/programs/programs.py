"""What a spec lowers to: programs over one parameter table, the functions they call, the groups that fusion makes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specc.compiler.blocks.init import Init
from specc.compiler.expr import KEEPS, Keep
from specc.compiler.ir.graph import Graph, Named, Node, TensorType, node_of
from specc.compiler.ops.region import Call, Fused
from specc.compiler.strict import Path, Problem


class LoweringError(Exception):
    """The spec is well formed but makes no model; `problems` say where and why."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Parameter:
    """One learned tensor: its name is that of checkpoints, rules and reports. The optimizer owns it in f32; programs
    read it in `dtype`. `storage` is how the deployed model stores it, empty while it is not quantized; `optimizer` is
    an index into `train.optimizers`, None before one is assigned."""

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
    """A fused group. `forward` and `backward` are graphs whose nodes carry epilogues; `saved` are the values of
    `forward` that `backward` reads besides the incoming gradient; `members` are the nodes of the function that it
    replaced. Where nobody takes its gradient, `backward` is empty. `others` are the same group with something else kept
    for the backward than what `keep` names; a plan chooses."""

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
        """Whether it takes rows as one dim, however many they are in: products do, and what mixes tokens does not."""
        nodes = (*self.forward.nodes, *self.backward.nodes)
        return any(node.op.matrix and not node.op.mixes_tokens for node in nodes)


@dataclass(frozen=True, slots=True)
class Phase:
    """While less than the share `until` of a run is done, the model trains with the program `train`, and is scored with
    `score`; `rests` are the parameters that neither reads. With `rounds` that program rounds the inputs of products as
    the deployed model will, and wants weights that are rounded too. `writes` are the programs, one for the source and
    one for a token, by which a decoder writes what it is fed where that is not the truth."""

    until: float
    train: str
    score: str
    rests: tuple[str, ...] = ()
    rounds: bool = False
    writes: tuple[str, str] = ("encode", "extend")


@dataclass(frozen=True, slots=True)
class Programs:
    """All of a model. Functions are named `class.method`: `block.forward` is called where a block runs.

    `places` leads from the start of a node's name to the part of the spec that made it; `whole` names the programs that
    see whole sequences at once; `phases`, in order, are those of a run, which goes on with `train` and `score` where
    the last of them ends. No sequence has more than `context` tokens, where that is known. `buffers` are what programs
    read besides parameters and no optimizer owns: the inverse scales of inputs that are rounded. `constants` are the
    numbers that formulas of the spec give: a name for code, the number, the formula; `sizes` the names of dims: the
    number, and what it is; `layers` what formulas call so: the blocks of the model, those of both sides where it has
    two, 1 where it has none.
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
        """The spec path of the longest known prefix of a node's name; the whole model where none is known."""
        found = [(len(prefix), path) for prefix, path in self.places if node == prefix or node.startswith(f"{prefix}.")]
        return max(found)[1] if found else ("model",)


def flatten(programs: Programs, graph: Graph, groups: bool = True, at: str = "") -> Graph:
    """`graph`, running at `at`, with every call, and with `groups` every fused group, else those that nothing is
    learned through, replaced by the nodes that they run, under full names; a loop over time stays. Numbers that calls
    bind are named `$place.name`; `scalar_values` has them."""
    nodes: list[Node] = []
    renamed = _inline(programs, graph, at, at, {name: name for name, _ in graph.inputs}, nodes, groups)
    outputs = tuple((label, renamed[ref]) for label, ref in graph.outputs)
    params = (*((p.name, TensorType(p.shape, p.dtype, p.storage)) for p in programs.params), *programs.buffers)
    scalars = tuple(dict.fromkeys(ref[1:] for node in nodes for ref in node.inputs if ref.startswith("$")))
    return Graph(graph.name, graph.inputs, params, tuple(nodes), outputs, scalars)


def read_by(programs: Programs, name: str) -> frozenset[str]:
    """The parameters that the program `name` reads."""
    nodes = flatten(programs, programs.program(name)).nodes
    return frozenset(ref[1:] for node in nodes for ref in node.inputs if ref.startswith("@"))


def scalar_values(graph: Graph) -> Mapping[str, float]:
    """The number behind each scalar of the flattened program `graph`, by `place.name`."""
    calls = [(node.op.at, node.op.scalars) for node in graph.nodes if isinstance(node.op, Call)]
    return {f"{at}.{name}": value for at, scalars in calls for name, value in scalars}


def _inline(
    programs: Programs, graph: Graph, at: str, run: str, values: Mapping[str, str], nodes: list[Node], groups: bool
) -> dict[str, str]:
    """Appends the nodes of `graph`, running over `values` with the parameters at `at`, under names that begin with
    `run`; returns where each of its values went."""
    here = dict(values)
    prefix, own = (f"{name}." if name else "" for name in (run, at))

    def place(ref: str) -> str:
        return here.get(ref, f"{ref[0]}{own}{ref[1:]}" if ref[0] in "@$" else ref)

    ran: set[str] = set()
    for node in graph.nodes:
        inputs = tuple(map(place, node.inputs))
        if isinstance(node.op, Call):
            callee = programs.function(node.op.callee)
            given = {name: ref for (name, _), ref in zip(callee.inputs, inputs, strict=True)}
            begins = node.name if node.op.at in ran else node.op.at  # the nodes of each run have names of their own
            ran.add(node.op.at)
            inner = _inline(programs, callee, f"{own}{node.op.at}", f"{prefix}{begins}", given, nodes, groups)
            results = [inner[ref] for _, ref in callee.outputs]
        elif isinstance(node.op, Fused) and (groups or not programs.group(node.op.group).backward.outputs):
            forward = programs.group(node.op.group).forward
            given = {name: ref for (name, _), ref in zip(forward.inputs, inputs, strict=True)}
            inner = _inline(programs, forward, at, run, given, nodes, groups)
            results = [inner[ref] for _, ref in forward.outputs]
        else:
            name = f"{prefix}{node.name}"
            nodes.append(replace(node, name=name, inputs=inputs, members=tuple(f"{prefix}{m}" for m in node.members)))
            results = list(nodes[-1].outputs)
        here |= zip(node.outputs, results, strict=False)
    return here


def class_name(name: str) -> str:
    """The name of a class of generated code: `FusedMlp` for `fused_mlp`."""
    return "".join(word.capitalize() for word in name.split("_"))


def group_functions(programs: Programs) -> Mapping[str, str]:
    """The function that runs each group, by the group's name. Groups that compute the same, such as the rotation of q
    and that of k, share one: it is called after what they do."""
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
    """What a group computes, whatever its nodes and values are called."""
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
    """The graph with each group that nothing is learned through replaced by its nodes: it needs no function."""
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in graph.nodes:
        node = replace(node, inputs=tuple(names.get(ref, ref) for ref in node.inputs))
        group = programs.group(node.op.group) if isinstance(node.op, Fused) else None
        if group is None or group.backward.outputs:
            nodes.append(node)
            continue
        given = dict(zip((name for name, _ in group.forward.inputs), node.inputs, strict=True))
        for own in group.forward.nodes:
            nodes.append(replace(own, inputs=tuple(given.get(ref, ref) for ref in own.inputs)))
        names |= zip(node.outputs, (given.get(ref, ref) for _, ref in group.forward.outputs), strict=False)
    outputs = tuple((label, names.get(ref, ref)) for label, ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def owner(ref: str) -> str:
    """The class that a function belongs to: `block` for `block.forward`."""
    return node_of(ref).partition(".")[0]
