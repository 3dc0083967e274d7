"""The cost of a model, from its graphs: parameters, floating-point operations and bytes, per node or per token."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from specc.compiler.ir.graph import Graph
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import Scan
from specc.compiler.programs.programs import Programs, flatten
from specc.compiler.records import record

DECODING = ("decode", "step")  # the programs that extend texts by one token, with a contiguous and with a paged cache


@record
class NodeCost:
    """The cost of one node of a flattened program.

    Attributes:
        name: the full name of the node.
        op: the name of its op.
        flops: the number of floating-point operations.
        bytes: the number of bytes that the node moves if it reads each input once and writes each output once.
        matrix: whether the op is a matrix product or attention.
    """

    name: str
    op: str
    flops: int
    bytes: int
    matrix: bool


def node_costs(programs: Programs, program: str, sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """Returns the cost of every node of a program, with `sizes` for the symbolic dims. A multiply-add counts as two
    operations.

    A loop over time has one entry for the loop, and one entry per node of its step function. The entry of such a node
    has the cost of all steps.
    """
    graph = flatten(programs, programs.program(program))
    costs = list(graph_costs(graph, sizes))
    for node in graph.nodes:
        if isinstance(node.op, Scan):
            step = flatten(programs, programs.function(node.op.callee), at=node.op.at)
            times = node.types[-1].extents(sizes)[1]
            for cost in graph_costs(step, sizes):
                costs.append(replace(cost, flops=times * cost.flops, bytes=times * cost.bytes))
    return tuple(costs)


def graph_costs(graph: Graph, sizes: Mapping[str, int]) -> Iterator[NodeCost]:
    """Yields the cost of every node of a graph. Calls and fused groups are not expanded, so operations inside them do
    not count."""
    types = graph.types
    for node in graph.nodes:
        inputs = [types[ref] for ref in node.inputs]
        flops = node.op.flops(inputs[: node.op.arity] if node.epilogue else inputs, node.types, sizes)
        moved = node.op.moved(inputs, node.types, sizes)
        yield NodeCost(node.name, node.op.name, flops, moved, node.op.matrix)


def boundary_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Returns the number of bytes that a graph moves if it reads each input and parameter once, and writes each output
    once."""
    read = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    written = {ref for _, ref in graph.outputs} - read
    return sum(graph.types[ref].bytes(sizes) for ref in read | written)


def cached_numbers(programs: Programs, tokens: int) -> int:
    """Returns the number of elements in the decoding cache of `tokens` tokens. The number is 0 if the programs use no
    cache."""
    return sum(type.count(sizes) for type, sizes in _caches(programs, tokens))


def cached_bytes(programs: Programs, tokens: int) -> int:
    """Returns the number of bytes of the decoding cache of `tokens` tokens. The number is 0 if the programs use no
    cache."""
    return sum(type.bytes(sizes) for type, sizes in _caches(programs, tokens))


def _caches(programs: Programs, tokens: int) -> Iterator[tuple[TensorType, Mapping[str, int]]]:
    caches = {name: type for graph in programs.programs for name, type in graph.inputs if name.startswith("cache.")}
    for type in caches.values():
        # The second dim is the number of positions per page
        pages = -(-tokens // int(type.shape[1])) if type.shape[0] == "P" else 0
        yield type, {"B": 1, "S": tokens, "P": pages}


def used_parameters(programs: Programs) -> int:
    """Returns the number of parameters that one token uses. Parameters of experts to which the token is not routed do
    not count."""
    graph = flatten(programs, programs.program("train"))
    shares = {param.name: 1.0 for param in programs.params}
    for node in graph.nodes:
        share = node.op.used_share([graph.types[ref] for ref in node.inputs])
        if share < 1:
            shares |= {ref[1:]: share for ref in node.inputs if ref.startswith("@")}
    return round(sum(param.count * shares[param.name] for param in programs.params))


def flops_per_token(programs: Programs, tokens: int) -> int:
    """Returns the number of operations of matrix products and attention per token, in a forward pass over one window.

    An encoder-decoder also reads a source of `tokens` tokens. Training takes three times as many operations, because
    each matrix product has two gradients of the same cost.
    """
    costs = node_costs(programs, "train", {"B": 1, "T": tokens, "S": tokens})
    return sum(cost.flops for cost in costs if cost.matrix) // tokens


class DecodeCost(NamedTuple):
    """The minimum work of a decoding step.

    Attributes:
        flops: The number of operations in matrix products and attention.
        weights: The number of bytes of parameters, if each byte is read once. A lookup reads only the rows that it
            returns. An expert is read at most once, and only if a text uses it.
        cache: The number of bytes of the cache.
    """

    flops: int
    weights: int
    cache: int


def decode_cost(programs: Programs, rows: int, tokens: int) -> DecodeCost:
    """Returns the cost of a step that appends one token to each of `rows` texts of `tokens` tokens."""
    name = next(graph.name for graph in programs.programs if graph.name in DECODING)
    graph = flatten(programs, programs.program(name))
    types, sizes = graph.types, {"B": rows, "T": 1, "S": tokens}
    pages = [int(type.shape[1]) for _, type in graph.inputs if type.shape[:1] == ("P",)]
    if pages:  # the tokens of all texts are one row
        each = -(-tokens // pages[0])
        sizes |= {"B": 1, "T": rows, "R": rows, "K": 1, "N": each, "P": rows * each}
    read: dict[str, int] = {}
    for node in graph.nodes:
        inputs = [types[ref] for ref in node.inputs]
        share = min(rows * node.op.used_share(inputs), 1.0) if node.op.matrix else 1.0
        most = max((type.bytes(sizes) for type in node.types), default=0)
        for ref in node.inputs:
            if ref.startswith("@"):
                whole = types[ref].bytes(sizes)
                read[ref] = max(read.get(ref, 0), round(share * whole) if node.op.matrix else min(whole, most))
    cache = sum(type.bytes(sizes) for name, type in graph.inputs if name.startswith("cache."))
    flops = sum(cost.flops for cost in node_costs(programs, name, sizes) if cost.matrix)
    return DecodeCost(flops, sum(read.values()), cache)
