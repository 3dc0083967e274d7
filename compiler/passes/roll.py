"""Replaces the calls of a stack of blocks by one node. The node is a loop over a module list."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from typing import ClassVar

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ir.op import Op
from specc.compiler.ops.region import Call
from specc.compiler.passes.merge import NONE
from specc.compiler.programs.programs import Programs, without_scoring_groups
from specc.compiler.records import record

STATES = ("cache.", "state.")  # prefixes of the names of values that persist between tokens
Layers = tuple[int, ...]


@record
class Loop(Op):
    """Runs the blocks of the module list `at` in sequence. A run is one call of a block. A block may have several
    runs.

    A join module combines the output of an earlier run with the residual stream.

    Attributes:
        at: The path of the module list.
        names: The names of the blocks' inputs. The first input, the residual stream, is omitted. If blocks read
            different values under one name, there is one entry per value: the name, a space, and the value.
        some: The inputs that only some blocks read: the name of the input, and the indices of these blocks.
        earlier: The inputs that are outputs of earlier runs. An entry has the name of the input, the label of the
            output (empty for the residual stream), and pairs of runs: the run that reads the input, and the earlier
            run.
        returns: The labels of the blocks' outputs without the residual stream and the state.
        joined: The path of the list of join modules.
        join_methods: Pairs of a block index and a method name. The join module before this block runs this method
            instead of `forward`.
        runs: For each run, in order, the index of the block.
        joins: For each run with a join before it: the run, the index of the join module, and the earlier run.
        methods: The names of the block methods that the runs call, without the name of the class.
        keeps: Whether each block has state.
    """

    name: ClassVar[str] = "loop"
    inline: ClassVar[bool] = False
    matrix: ClassVar[bool] = True
    at: str
    names: tuple[str, ...]
    some: tuple[tuple[str, Layers], ...] = ()
    earlier: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...] = ()
    returns: tuple[str, ...] = ()
    joined: str = ""
    join_methods: tuple[tuple[int, str], ...] = ()
    runs: Layers = field(default=(), compare=False)
    joins: tuple[tuple[int, tuple[int, int]], ...] = field(default=(), compare=False)
    methods: frozenset[str] = field(default=frozenset(), compare=False)
    keeps: bool = field(default=False, compare=False)

    @property
    def stateful(self) -> bool:
        """Whether the loop passes a state to each block. The state may be empty."""
        return self.keeps or any(method.startswith("extend") for method in self.methods)

    @property
    def repeats(self) -> bool:
        return len(set(self.runs)) < len(self.runs)


@record
class Begin(Op):
    """Creates the initial state of every block in the list `at`, by a call of the block's `method`."""

    name: ClassVar[str] = "begin"
    inline: ClassVar[bool] = False
    at: str
    method: str


def field_of(node: Node) -> str:
    """Returns the path of the module list that contains the called block. The result is empty if the node does not call
    a block of a module list."""
    if not isinstance(node.op, Call):
        return ""
    place, _, number = node.op.at.rpartition(".")
    return place if number.isdigit() else ""


def index_of(call: Node) -> int:
    """Returns the index of the called block in its module list."""
    assert isinstance(call.op, Call)
    return int(call.op.at.rpartition(".")[2])


def method_of(call: Node) -> str:
    """Returns the name of the block's method that the call runs."""
    assert isinstance(call.op, Call)
    return call.op.callee.partition(".")[2]


def roll(programs: Programs, graph: Graph) -> Graph:
    """Returns the program with one node per stack of blocks. The states of single blocks are no longer inputs and
    outputs of the program."""
    graph = without_scoring_groups(programs, graph)
    nodes: list[Node] = []
    state = {name for name, _ in graph.inputs if name.startswith(STATES)}
    outputs = {label: ref for label, ref in graph.outputs if label not in state}
    renamed: dict[str, str] = {}
    for run in _runs(graph.nodes):
        place = field_of(run[0])
        if not place:
            nodes.append(run[0])
        elif method_of(run[0]).startswith("begin"):
            assert len({call.inputs for call in run}) == 1
            begin = Begin(place, method_of(run[0]))
            nodes.append(Node(f"{place}.begin", begin, run[0].inputs, run[0].types[:1]))
            results = {ref for call in run for ref in call.outputs}
            outputs = {label: ref for label, ref in outputs.items() if ref not in results}
            outputs[f"state.{place}"] = nodes[-1].name
        else:
            nodes.append(_loop(programs, run))
            renamed[run[-1].name] = nodes[-1].name
    read = {ref for node in nodes for ref in node.inputs}
    inputs = tuple(entry for entry in graph.inputs if entry[0] not in state or entry[0] in read)
    return rename(replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=tuple(outputs.items())), renamed)


def _runs(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """Yields groups of adjacent nodes, in order. The calls of the blocks of one module list form a group. The group
    includes calls of join modules between these blocks. Any other node is a group by itself."""
    run: list[Node] = []
    for node, after in zip(nodes, (*nodes[1:], None), strict=True):
        place, of_run = field_of(node), field_of(run[0]) if run else ""
        joins = node.inputs[:1] == (run[-1].name,) and after is not None and field_of(after) == of_run if run else False
        if run and not (place and (place == of_run or joins)):
            yield run
            run = []
        run.append(node)
        if not place:
            yield run
            run = []
    if run:
        yield run


def _loop(programs: Programs, calls: Sequence[Node]) -> Node:
    """Returns one loop node for `calls`. A block's first input is the output of the previous block. The other inputs
    come from outside the loop, from earlier blocks, or from the block's state."""
    place = field_of(calls[0])
    blocks = [call for call in calls if field_of(call) == place]
    runs = tuple(map(index_of, blocks))
    numbers = {call.name: i for i, call in enumerate(blocks)}
    arguments = [_arguments(programs, call) for call in blocks]
    shared: dict[str, str] = {}
    some: dict[str, Layers] = {}
    earlier: list[tuple[str, str, tuple[tuple[int, int], ...]]] = []
    keeps = False
    for name in merged_order([list(passed) for passed in arguments])[1:]:
        values = {i: passed[name] for i, passed in enumerate(arguments) if name in passed}
        refs = set(values.values())
        if all(map(of_block, refs)):
            keeps = True
        elif {node_of(ref) for ref in refs} <= numbers.keys():
            pairs = tuple((i, numbers[node_of(ref)]) for i, ref in values.items())
            (label,) = {_label(programs, calls, ref) for ref in refs}
            earlier.append((name, label, pairs))
        else:
            for ref in sorted(refs):
                key = name if len(refs) == 1 else f"{name} {ref}"
                shared[key] = ref
                having = {runs[i] for i, value in values.items() if value == ref}
                if len(having) < len(set(runs)):
                    some[key] = tuple(sorted(having))
    joined = [(call, after) for call, after in pairwise(calls) if call.name not in numbers]
    op = Loop(
        place,
        tuple(shared),
        tuple(some.items()),
        tuple(earlier),
        _returned(programs, blocks),
        field_of(joined[0][0]) if joined else "",
        tuple((index_of(after), method_of(call)) for call, after in joined if method_of(call) != "forward"),
        runs,
        tuple((numbers[after.name], (index_of(call), numbers[call.inputs[1]])) for call, after in joined),
        frozenset(map(method_of, blocks)),
        keeps,
    )
    return Node(place, op, (calls[0].inputs[0], *shared.values()), calls[-1].types[:1])


def returns_of(graph: Graph) -> Iterator[str]:
    """Yields the output labels of a block's function, without the residual stream and the state."""
    state = {name for name, _ in graph.inputs}
    return (label for label, _ in graph.outputs[1:] if label not in state)


def _returned(programs: Programs, blocks: Sequence[Node]) -> tuple[str, ...]:
    functions = dict.fromkeys(call.op.callee for call in blocks if isinstance(call.op, Call))
    return tuple(dict.fromkeys(label for name in functions for label in returns_of(programs.function(name))))


def _label(programs: Programs, calls: Sequence[Node], ref: str) -> str:
    call = next(call for call in calls if ref in call.outputs)
    assert isinstance(call.op, Call)
    index = call.outputs.index(ref)
    return programs.function(call.op.callee).outputs[index][0] if index else ""


def of_block(ref: str) -> bool:
    """Returns whether a program input is the state of a single block. The name of such an input contains the index of
    the block."""
    return ref.startswith(STATES) and any(word.isdigit() for word in ref.split("."))


def _arguments(programs: Programs, call: Node) -> Mapping[str, str]:
    assert isinstance(call.op, Call)
    names = (name for name, _ in programs.function(call.op.callee).inputs)
    return dict(zip(names, call.inputs, strict=True))


def merged_order(orders: Sequence[Sequence[str]]) -> list[str]:
    """Returns all names in one order that is consistent with each of `orders`. If two orders contradict each other, the
    earlier order applies."""
    merged: list[str] = []
    while rest := [left for order in orders if (left := [name for name in order if name not in merged])]:
        free = (left[0] for left in rest if all(left[0] not in other[1:] for other in rest))
        merged.append(next(free, rest[0][0]))
    return merged


def aligned(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """Changes the loops of the programs, so that all loops over one module list have the same inputs in the same order.
    Returns the changed programs.

    A loop that lacks an input receives the value that another program passes. If the program of the loop does not
    compute this value before the loop, the loop receives `None`.
    """
    loops = [(node.op, node.inputs) for graph in graphs for node in graph.nodes if isinstance(node.op, Loop)]

    def widened(graph: Graph, node: Node) -> Node:
        if not isinstance(node.op, Loop):
            return node
        same = [(op, inputs) for op, inputs in loops if op.at == node.op.at]
        names = tuple(merged_order([op.names for op, _ in same]))
        joins = {entry for op, _ in same for entry in op.join_methods}
        values = {name: ref for op, inputs in same for name, ref in zip(op.names, inputs[1:], strict=True)}
        before = {ref for other in graph.nodes[: graph.nodes.index(node)] for ref in other.outputs}
        passed = {name: ref if ref in before else NONE for name, ref in values.items()}
        passed |= zip(node.op.names, node.inputs[1:], strict=True)
        op = replace(node.op, names=names, join_methods=tuple(sorted(joins)))
        return replace(node, op=op, inputs=(node.inputs[0], *(passed[name] for name in names)))

    return tuple(replace(graph, nodes=tuple(widened(graph, node) for node in graph.nodes)) for graph in graphs)
