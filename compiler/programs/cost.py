"""The cost of a model: parameters, floating-point operations and bytes, per node or per token, from the graph."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from specc.compiler.ir.graph import Graph
from specc.compiler.ops.region import Scan
from specc.compiler.programs.programs import Programs, flatten


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cost of one node of a flattened program.

    Attributes:
        name: the full name of the node.
        op: the name of its op.
        flops: the number of floating-point operations.
        bytes: the bytes that it moves if it reads each input and writes each output once.
        matrix: whether the op is a matrix product or attention.
    """

    name: str
    op: str
    flops: int
    bytes: int
    matrix: bool


def node_costs(programs: Programs, program: str, sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """Returns the cost of every node of a program, with its symbolic dims set to `sizes`.

    A loop over time has, in addition to its own node, one entry per node of its step, with the cost of all steps. A
    multiply-add counts as two operations.
    """
    graph = flatten(programs, programs.program(program))
    costs = list(graph_costs(graph, sizes))
    for node in graph.nodes:
        if isinstance(node.op, Scan):
            step = flatten(programs, programs.function(node.op.callee), at=node.op.at)
            steps = node.types[-1].shape[1]
            times = sizes[steps] if isinstance(steps, str) else steps
            for cost in graph_costs(step, sizes):
                costs.append(replace(cost, flops=times * cost.flops, bytes=times * cost.bytes))
    return tuple(costs)


def graph_costs(graph: Graph, sizes: Mapping[str, int]) -> Iterator[NodeCost]:
    """Yields the cost of every node of one graph without flattening it. Calls and groups inside it count no
    operations."""
    types = graph.types
    for node in graph.nodes:
        inputs = [types[ref] for ref in node.inputs]
        flops = node.op.flops(inputs[: node.op.arity] if node.epilogue else inputs, node.types, sizes)
        moved = sum(type.bytes(sizes) for type in (*inputs, *node.types))
        yield NodeCost(node.name, node.op.name, flops, moved, node.op.matrix)


def boundary_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Returns the minimum number of bytes that a graph moves: each input and parameter read once, each output written
    once."""
    read = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    written = {ref for _, ref in graph.outputs} - read
    return sum(graph.types[ref].bytes(sizes) for ref in read | written)


def flops_per_token(programs: Programs, tokens: int) -> int:
    """Returns the operations of matrix products and attention in a forward pass over one window, divided by its tokens.

    A model with a source also reads a source of `tokens` tokens. Training takes three times as many operations, because
    each product has two gradients of the same cost.
    """
    costs = node_costs(programs, "train", {"B": 1, "T": tokens, "S": tokens})
    return sum(cost.flops for cost in costs if cost.matrix) // tokens
