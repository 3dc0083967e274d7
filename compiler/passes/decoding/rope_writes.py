"""Combines the rotation of queries and keys with the writes to a cache, in decoding steps."""

from dataclasses import replace
from typing import NamedTuple

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.caches.cached_attention import SdpaCached
from specc.compiler.ops.caches.key_value_cache import CacheWrite, ToCodes
from specc.compiler.ops.caches.paged_attention import PackedPositions, PagedWrite
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.compiler.ops.positions import Positions, Rope, RopeAngles, RopeRows
from specc.compiler.ops.sequence import Concat
from specc.compiler.programs.programs import Programs


def rope_writes(programs: Programs) -> Programs:
    """Returns the programs with one `RopeWrite` in place of several nodes. These are the rotations of q and k by the
    same angles, the rounding of the new rows to codes, and the writes of k and v to a cache.

    These nodes are replaced only if no other node reads the written rows. In latent attention, a row consists of v and
    the rotated k. The new node reads the angles from a table.

    In programs that append one token, the new node may write the token to a ring buffer before attention reads the
    buffer. This order is correct, because attention masks the position that the token overwrites.
    """
    single = all(dict(graph.inputs)["ids"].shape[1] == 1 for graph in programs.programs)
    return programs.rewritten(lambda graph: _rewritten(graph, programs.context, single))


class _Stored(NamedTuple):
    """The nodes that write a row to a cache. If the cache holds codes, the nodes `codes` round the row to codes and
    scales. The nodes `writes` store the row, or its codes and scales."""

    codes: tuple[Node, ...]
    writes: tuple[Node, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.codes, *self.writes)


NOTHING = _Stored((), ())


def _rewritten(graph: Graph, context: int | None, single: bool) -> Graph:
    if context is not None:
        graph = replace(graph, nodes=tuple(_from_table(graph, node, context) for node in graph.nodes))
    for name in tuple(graph.by_name):
        k = graph.by_name.get(name)
        if k is not None and isinstance(k.op, Rope):
            graph = _joined(graph, k, k.op, single)
    return graph


def _from_table(graph: Graph, node: Node, context: int) -> Node:
    if not isinstance(node.op, RopeAngles):
        return node
    positions = graph.by_name.get(node_of(node.inputs[0]))
    if positions is None or not isinstance(positions.op, Positions | PackedPositions):
        return node
    return replace(node, op=RopeRows(node.op.dims, node.op.base, context))


def _joined(graph: Graph, k: Node, rope: Rope, single: bool) -> Graph:
    """Returns the graph with a `RopeWrite` for the keys `k`. Returns the graph unchanged if other nodes read values
    that the new node does not compute."""
    concat = next((node for node in graph.consumers[k.name] if isinstance(node.op, Concat)), None)
    if concat is not None and (graph.uses(k.name) > 1 or concat.inputs[1] != k.name):
        return graph
    keys = _stored(graph, k.name if concat is None else concat.name, single, only=True)
    rows = [] if keys is None else _values(graph, k, keys, single) if concat is None else [(concat.inputs[0], NOTHING)]
    queries = [n for n in graph.nodes if n.op == rope and n is not k and n.inputs[1:] == k.inputs[1:]]
    if keys is None or len(rows) != 1 or len(queries) != 1:
        return graph
    q, (v, values), (first, *_) = queries[0], rows[0], keys.writes
    members = (q, k, *([concat] if concat is not None else []), *keys.nodes, *values.nodes)
    later = _later(graph, members)
    inside = {node.name for node in later}
    if any(node_of(ref) in inside for node in members for ref in node.inputs):
        return graph
    ring = first.op.ring if isinstance(first.op, CacheWrite) else None
    op = RopeWrite(rope.neighbors, concat is not None, bool(keys.codes), ring, isinstance(first.op, PagedWrite))
    writes = (first, *values.writes[:1], *keys.writes[1:], *values.writes[1:])  # in the order of `stored`
    new = [write.inputs[1] for name, write in zip(op.stored, writes, strict=True) if name in op.new]
    inputs = (q.inputs[0], k.inputs[0], v, *k.inputs[1:], *(write.inputs[0] for write in writes), *first.inputs[2:])
    types = (q.type, *(write.type for write in writes), *(graph.types[ref] for ref in new))
    node = Node(q.name, op, inputs, types, None, tuple(member.name for member in members))
    cached = node.outputs[1 : 1 + len(writes)]
    names = {write.name: ref for write, ref in zip(writes, cached, strict=True)}
    names |= dict(zip(new, node.outputs[1 + len(writes) :], strict=True))
    if ring is not None:
        names |= {write.inputs[0]: ref for write, ref in zip(writes, cached, strict=True)}
    before = tuple(old for old in graph.nodes if old not in members and old not in later)
    after = rename(replace(graph, nodes=later), names)
    return replace(after, nodes=(*before, node, *after.nodes))


def _later(graph: Graph, members: tuple[Node, ...]) -> tuple[Node, ...]:
    names = {node.name for node in members}
    later: list[Node] = []
    for node in graph.nodes:
        if node not in members and any(node_of(ref) in names for ref in node.inputs):
            names.add(node.name)
            later.append(node)
    return tuple(later)


def _stored(graph: Graph, row: str, single: bool, only: bool) -> _Stored | None:
    """Returns the nodes that write the rows `row` to a cache. Returns None if no nodes write the rows, or if other
    nodes read the written values.

    Args:
        graph: The graph.
        row: The reference of the rows, [B, T, G, C].
        single: Whether the graph appends one token to each text. If so, a ring buffer may be written before attention
            reads the buffer.
        only: Whether to return None if other nodes read `row`.
    """
    codes = tuple(node for node in graph.consumers[row] if isinstance(node.op, ToCodes))
    if len(codes) > 1 or (codes and only and graph.uses(row) > 1):
        return None
    writes: list[Node] = []
    for ref in codes[0].outputs if codes else (row,):
        readers = graph.consumers[ref]
        matching = [node for node in readers if isinstance(node.op, CacheWrite | PagedWrite) and node.inputs[1] == ref]
        if len(matching) != 1 or graph.types[matching[0].inputs[0]].shape[0] not in ("B", "P"):
            return None
        (write,) = matching
        ring = write.op.ring if isinstance(write.op, CacheWrite) else None
        expected = [node for node in readers if ring is not None and _reads_ring(node, ring)]
        if (codes or only) and graph.uses(ref) > 1 + len(expected):
            return None
        others = [node for node in graph.consumers[write.inputs[0]] if node is not write]
        if ring is not None and not (single and all(_reads_ring(node, ring) for node in others)):
            return None
        writes.append(write)
    same = len({(write.op, write.inputs[2:]) for write in writes}) == 1
    return _Stored(codes, tuple(writes)) if same else None


def _reads_ring(node: Node, ring: tuple[int, int]) -> bool:
    return isinstance(node.op, SdpaCached) and node.op.ring == ring


def _values(graph: Graph, k: Node, keys: _Stored, single: bool) -> list[tuple[str, _Stored]]:
    """Returns the values of attention that the graph writes to a cache at the positions of the keys. An entry has the
    reference of a value, and the nodes that write the value. Rotated values are left out. Values are also left out if
    the cache stores only keys or only values as codes, or if keys and values differ in tokens or heads."""
    rows = []
    for node in graph.nodes:
        if node.op == keys.writes[0].op and node.inputs[2:] == keys.writes[0].inputs[2:] and node not in keys.writes:
            producer = graph.by_name.get(node_of(node.inputs[1]))
            row = producer.inputs[0] if producer is not None and isinstance(producer.op, ToCodes) else node.inputs[1]
            rows += [row] if row not in rows else []
    values = []
    for row in rows:
        producer = graph.by_name.get(node_of(row))
        stored = _stored(graph, row, single, only=False)
        alike = stored is not None and bool(stored.codes) == bool(keys.codes)
        if stored is not None and alike and graph.types[row].shape[:-1] == k.type.shape[:-1]:
            values += [] if producer is not None and isinstance(producer.op, Rope) else [(row, stored)]
    return values
