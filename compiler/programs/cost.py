"""What a model costs: parameters, floating-point operations and bytes, a node or a token, from the graph."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from specc.compiler.ir.graph import Graph
from specc.compiler.ops.region import Scan
from specc.compiler.programs.programs import Programs, flatten


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node of a flattened program: operations, and the bytes it reads and writes once each."""

    name: str
    op: str
    flops: int
    bytes: int
    matrix: bool


def node_costs(programs: Programs, program: str, sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """The cost of every node of a program once its symbols have `sizes`, that of a loop over time node by node for all
    its steps. A multiply-add counts two operations."""
    graph = flatten(programs, programs.program(program))
    found = list(graph_costs(graph, sizes))
    for node in graph.nodes:
        if isinstance(node.op, Scan):
            step = flatten(programs, programs.function(node.op.callee), at=node.op.at)
            steps = node.types[-1].shape[1]
            times = sizes[steps] if isinstance(steps, str) else steps
            for cost in graph_costs(step, sizes):
                found.append(replace(cost, flops=times * cost.flops, bytes=times * cost.bytes))
    return tuple(found)


def graph_costs(graph: Graph, sizes: Mapping[str, int]) -> Iterator[NodeCost]:
    """The cost of every node of one graph as it stands; a call or a group inside it counts no operations."""
    types = graph.types
    for node in graph.nodes:
        inputs = [types[ref] for ref in node.inputs]
        flops = node.op.flops(inputs[: node.op.arity] if node.epilogue else inputs, node.types, sizes)
        moved = sum(type.bytes(sizes) for type in (*inputs, *node.types))
        yield NodeCost(node.name, node.op.name, flops, moved, node.op.matrix)


def boundary_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """What a graph moves at least, whatever happens inside: each input and each output once."""
    read = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    written = {ref for _, ref in graph.outputs} - read
    return sum(graph.types[ref].bytes(sizes) for ref in read | written)


def flops_per_token(programs: Programs, tokens: int) -> int:
    """Operations of matrix products and attention in a forward pass over one window, and over a source of one where
    there is a source, divided by the window's tokens.

    Training takes three times as many: each product has two gradients of its own cost.
    """
    costs = node_costs(programs, "train", {"B": 1, "T": tokens, "S": tokens})
    return sum(cost.flops for cost in costs if cost.matrix) // tokens
