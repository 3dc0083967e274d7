"""Rolls the calls of a stack of blocks, one a block, into one node: a loop over a list of modules."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar

from specc.compiler.ir.graph import Graph, Node, Op, rename
from specc.compiler.ops.region import Call
from specc.compiler.passes.merge import NONE
from specc.compiler.programs.programs import Programs, without_scoring_groups

STATES = ("cache.", "state.")  # what begins the names of values that are kept between tokens
Layers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop(Op):
    """Runs the blocks of the module list `at` one behind the other.

    Attributes:
        at: where the list is.
        names: what blocks call the inputs behind the first, which is the stream.
        some: the blocks that are given an input, for inputs that not all are.
        earlier: for an input that is the output of an earlier run: run -> that run.
        joined: the module list of what joins the output of an earlier run to the stream.
        join_methods: the functions that joins call, by the block behind the join, where these are not `forward`.
        runs: the blocks in the order in which they run.
        joins: run -> the skip before it, in the list `joined`, and the run whose output that joins to the stream.
        methods: the functions that the runs call, without their class.
        keeps: whether each block has state.
    """

    name: ClassVar[str] = "loop"
    inline: ClassVar[bool] = False
    matrix: ClassVar[bool] = True
    at: str
    names: tuple[str, ...]
    some: tuple[tuple[str, Layers], ...] = ()
    earlier: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    joined: str = ""
    join_methods: tuple[tuple[int, str], ...] = ()
    runs: Layers = field(default=(), compare=False)
    joins: tuple[tuple[int, tuple[int, int]], ...] = field(default=(), compare=False)
    methods: frozenset[str] = field(default=frozenset(), compare=False)
    keeps: bool = field(default=False, compare=False)

    @property
    def extends(self) -> bool:
        """Whether it goes on from a cache, be there something in it or not."""
        return any(method.startswith("extend") for method in self.methods)

    @property
    def repeats(self) -> bool:
        """Whether a block runs more than once."""
        return len(set(self.runs)) < len(self.runs)


@dataclass(frozen=True, slots=True)
class Begin(Op):
    """The state that every block of the list `at` begins with, made by `method` of each."""

    name: ClassVar[str] = "begin"
    inline: ClassVar[bool] = False
    at: str
    method: str
    outputs: int


def field_of(node: Node) -> str:
    """The module list that a call's block is in; empty for what is no such call."""
    if not isinstance(node.op, Call):
        return ""
    place, _, number = node.op.at.rpartition(".")
    return place if number.isdigit() else ""


def index_of(call: Node) -> int:
    """Where in its module list a call's block is."""
    assert isinstance(call.op, Call)
    return int(call.op.at.rpartition(".")[2])


def method_of(call: Node) -> str:
    """The method of a block that a call runs."""
    assert isinstance(call.op, Call)
    return call.op.callee.partition(".")[2]


def roll(programs: Programs, graph: Graph) -> Graph:
    """A program with one node for each stack of blocks; what a state's inputs and outputs are to blocks is left out."""
    graph = without_scoring_groups(programs, graph)
    nodes: list[Node] = []
    outputs = dict(graph.outputs)
    renamed: dict[str, str] = {}
    for run in _runs(graph.nodes):
        if not field_of(run[0]):
            nodes.append(run[0])
        elif method_of(run[0]).startswith("begin"):
            begin = _begin(run)
            nodes.append(begin)
            made = {ref for call in run for ref in call.outputs}
            gone = [label for label, ref in outputs.items() if ref in made]
            outputs |= {f"state.{field_of(run[0])}": begin.name}
            outputs = {label: ref for label, ref in outputs.items() if label not in gone}
        else:
            loop = _loop(programs, graph, run)
            nodes.append(loop)
            renamed[run[-1].name] = loop.name
    state = set(_stated(graph))
    kept = {label: ref for label, ref in outputs.items() if not (label.startswith(STATES) and label in state)}
    read = {ref for node in nodes for ref in node.inputs}
    inputs = tuple(entry for entry in graph.inputs if not entry[0].startswith(STATES) or entry[0] in read)
    rolled = replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=tuple(kept.items()))
    return rename(rolled, renamed)


def _stated(graph: Graph) -> Iterator[str]:
    """The inputs of a program that are state."""
    return (name for name, _ in graph.inputs if name.startswith(STATES))


def _runs(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """The nodes in order, the calls of a module list, or that read one another's value, together."""
    run: list[Node] = []
    for node in (*nodes, None):
        place = field_of(node) if node is not None else ""
        follows = node is not None and run and (place == field_of(run[0]) or node.inputs[:1] == (run[-1].name,))
        if run and not (place and follows):
            yield tuple(run)
            run = []
        if node is not None and place:
            run.append(node)
        elif node is not None:
            yield (node,)


def _begin(calls: Sequence[Node]) -> Node:
    assert len({call.inputs for call in calls}) == 1
    place = field_of(calls[0])
    op = Begin(place, method_of(calls[0]), len(calls[0].types))
    return Node(f"{place}.begin", op, calls[0].inputs, calls[0].types[:1])


def _loop(programs: Programs, graph: Graph, calls: Sequence[Node]) -> Node:
    """One node for `calls`. Each block's first input is the output before it. The others are the same in every call
    that has them, or the output of an earlier block, or a block's own state."""
    place = field_of(calls[0])
    blocks = [call for call in calls if field_of(call) == place]
    runs = tuple(map(index_of, blocks))
    numbers = {call.name: i for i, call in enumerate(blocks)}
    given = [_arguments(programs, call) for call in blocks]
    shared: dict[str, str] = {}
    some: dict[str, Layers] = {}
    earlier: dict[str, tuple[tuple[int, int], ...]] = {}
    keeps = False
    for name in merged_order([list(one) for one in given])[1:]:
        found = {i: one[name] for i, one in enumerate(given) if name in one}
        refs = set(found.values())
        if all(map(of_block, refs)):
            keeps = True
        elif refs <= numbers.keys():
            earlier[name] = tuple((i, numbers[ref]) for i, ref in found.items())
        else:
            assert len(refs) == 1, "calls may differ only in their state and their skip"
            shared[name] = refs.pop()
            if len(found) < len(blocks):
                some[name] = tuple(sorted({runs[i] for i in found}))
    joined = [(call, following) for call, following in pairwise(calls) if call.name not in numbers]
    joins = tuple((numbers[after.name], (index_of(call), numbers[call.inputs[1]])) for call, after in joined)
    methods = frozenset(map(method_of, blocks))
    op = Loop(
        place,
        tuple(shared),
        tuple(some.items()),
        tuple(earlier.items()),
        field_of(joined[0][0]) if joined else "",
        tuple((index_of(after), method_of(call)) for call, after in joined if method_of(call) != "forward"),
        runs,
        joins,
        methods,
        keeps,
    )
    return Node(place, op, (calls[0].inputs[0], *shared.values()), calls[-1].types[:1])


def of_block(ref: str) -> bool:
    """Whether an input of a program is the state of a block: its number stands in the name."""
    return ref.startswith(STATES) and any(word.isdigit() for word in ref.split("."))


def _arguments(programs: Programs, call: Node) -> Mapping[str, str]:
    """What a call passes, by the name that its callee has for it, in order."""
    assert isinstance(call.op, Call)
    names = (name for name, _ in programs.function(call.op.callee).inputs)
    return dict(zip(names, call.inputs, strict=True))


def merged_order(orders: Sequence[Sequence[str]]) -> list[str]:
    """One order of all names that each of `orders` is a part of; the first decides where they contradict."""
    merged: list[str] = []
    while rest := [left for order in orders if (left := [name for name in order if name not in merged])]:
        free = (left[0] for left in rest if all(left[0] not in other[1:] for other in rest))
        merged.append(next(free, rest[0][0]))
    return merged


def aligned(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """Rolled programs in which loops over one list name the same inputs, in one order; `None` stands for what a program
    does not have."""
    places = dict.fromkeys(node.op.at for graph in graphs for node in graph.nodes if isinstance(node.op, Loop))
    for place in places:
        loops = [node.op for graph in graphs for node in graph.nodes if _is(node, place)]
        names = tuple(merged_order([list(loop.names) for loop in loops if isinstance(loop, Loop)]))
        joins = {entry for loop in loops if isinstance(loop, Loop) for entry in loop.join_methods}
        values = {
            name: ref
            for graph in graphs
            for node in graph.nodes
            if _is(node, place) and isinstance(node.op, Loop)
            for name, ref in zip(node.op.names, node.inputs[1:], strict=True)
        }
        graphs = [
            replace(
                graph,
                nodes=tuple(
                    _with(graph, node, names, joins, values) if _is(node, place) else node for node in graph.nodes
                ),
            )
            for graph in graphs
        ]
    return tuple(graphs)


def _is(node: Node, place: str) -> bool:
    return isinstance(node.op, Loop) and node.op.at == place


def _with(
    graph: Graph, node: Node, names: Sequence[str], joins: Collection[tuple[int, str]], values: Mapping[str, str]
) -> Node:
    """A loop with inputs of these `names`: where it has none, the value that other programs pass, if it is there."""
    assert isinstance(node.op, Loop)
    given = dict(zip(node.op.names, node.inputs[1:], strict=True))
    before = {ref for other in graph.nodes[: graph.nodes.index(node)] for ref in other.outputs}
    inputs = [given.get(name, values[name] if values[name] in before else NONE) for name in names]
    op = replace(node.op, names=tuple(names), join_methods=tuple(sorted(joins)))
    return replace(node, op=op, inputs=(node.inputs[0], *inputs))
