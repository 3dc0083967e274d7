"""Joins the rotation of queries and keys, and the writes of keys and values to a cache, in decoding steps."""

from collections.abc import Iterator
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.caches.key_value_cache import CacheWrite
from specc.compiler.ops.caches.paged_attention import PackedPositions
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.compiler.ops.positions import Positions, Rope, RopeAngles, RopeRows
from specc.compiler.programs.programs import Programs


def rope_writes(programs: Programs) -> Programs:
    """Returns the programs with a `RopeWrite` in place of the rotations of q and k by the same angles and of the writes
    of the rotated k and of v to a cache without a ring, if nothing else reads the rotated k. Angles are read from a
    table."""
    graphs, functions = (
        tuple(_rewritten(graph, programs.context) for graph in group)
        for group in (programs.programs, programs.functions)
    )
    return replace(programs, programs=graphs, functions=functions)


def _rewritten(graph: Graph, context: int | None) -> Graph:
    if context is not None:
        graph = replace(graph, nodes=tuple(_from_table(graph, node, context) for node in graph.nodes))
    for name in tuple(graph.by_name):
        write = graph.by_name.get(name)
        members = write and _members(graph, write)
        if members:
            graph = _joined(graph, *members)
    return graph


def _from_table(graph: Graph, node: Node, context: int) -> Node:
    """Returns the node; for angles of positions themselves, not of numbers computed from them, one that reads a
    table."""
    if not isinstance(node.op, RopeAngles):
        return node
    positions = graph.by_name.get(node_of(node.inputs[0]))
    if positions is None or not isinstance(positions.op, Positions | PackedPositions):
        return node
    return replace(node, op=RopeRows(node.op.dims, node.op.base, context))


def _members(graph: Graph, write: Node) -> tuple[Node, Node, Node, Node] | None:
    """Returns the rotation of q, that of k, and the writes of keys and values; None if the nodes differ from these."""
    if write.op != CacheWrite() or graph.types[write.inputs[0]].shape[0] != "B":
        return None
    k = graph.by_name.get(node_of(write.inputs[1]))
    if k is None or not isinstance(k.op, Rope) or graph.uses(k.name) > 1:
        return None
    values = [n for n in _writes(graph, write) if graph.types[n.inputs[1]].shape[:-1] == k.type.shape[:-1]]
    queries = [n for n in graph.nodes if n.op == k.op and n is not k and n.inputs[1:] == k.inputs[1:]]
    if len(values) != 1 or len(queries) != 1:
        return None
    members = queries[0], k, write, values[0]
    later = {node.name for node in _later(graph, members)}
    return None if any(node_of(ref) in later for node in members for ref in node.inputs) else members


def _later(graph: Graph, members: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns the other nodes that depend on the members, in order."""
    names = {node.name for node in members}
    later: list[Node] = []
    for node in graph.nodes:
        if node not in members and any(node_of(ref) in names for ref in node.inputs):
            names.add(node.name)
            later.append(node)
    return tuple(later)


def _writes(graph: Graph, keys: Node) -> Iterator[Node]:
    """Yields the other writes at the same positions whose values are not rotated."""
    for node in graph.nodes:
        if node.op == keys.op and node is not keys and node.inputs[2] == keys.inputs[2]:
            written = graph.by_name.get(node_of(node.inputs[1]))
            if written is None or not isinstance(written.op, Rope):
                yield node


def _joined(graph: Graph, q: Node, k: Node, keys: Node, values: Node) -> Graph:
    assert isinstance(k.op, Rope)
    inputs = (q.inputs[0], k.inputs[0], values.inputs[1], *k.inputs[1:], keys.inputs[0], values.inputs[0])
    types = (q.type, keys.type, values.type)
    members = (q, k, keys, values)
    op = RopeWrite(k.op.neighbors)
    node = Node(q.name, op, (*inputs, keys.inputs[2]), types, None, tuple(member.name for member in members))
    later = _later(graph, members)
    before = (old for old in graph.nodes if old not in members and old not in later)
    nodes = (*before, node, *later)
    return rename(replace(graph, nodes=nodes), {keys.name: node.outputs[1], values.name: node.outputs[2]})
