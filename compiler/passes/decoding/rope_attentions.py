"""Combines the rotation, the cache write and the attention of new tokens into one op, in decoding steps."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.kernels.attention.cached import CACHED_ATTENTION
from specc.compiler.kernels.kernel import refusal
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.decoding.rope_attention import RopeAttention
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.compiler.passes.select_kernels import site_of
from specc.compiler.plan.plan import place_pattern
from specc.compiler.programs.programs import Programs, Rewriting
from specc.compiler.targets import Target

STEP = "rope_attentions"


def rope_attentions(programs: Programs, target: Target) -> Programs:
    """Returns the programs with a `RopeAttention` in place of each `RopeWrite` and the attention that reads the
    rotated queries.

    Nodes are replaced only if the kernel for attention over a cache accepts the new node. `rewritings` of the result
    records each replaced node. `rewritings` also records the reason for each `RopeWrite` that is not replaced.

    Args:
        programs: The programs that append one token to each text, after `rope_writes`.
        target: The target, whose kernels must accept the new nodes.
    """
    rewritings: dict[Rewriting, None] = {}
    graphs: dict[str, Graph] = {}
    for graph in programs.graphs:
        for name in [node.name for node in graph.nodes if isinstance(node.op, RopeWrite)]:
            joined = _joined(programs, graph, graph.by_name[name], target)
            at = (place_pattern(programs, (graph.name,), name),)
            if isinstance(joined, str):
                rewritings[Rewriting(STEP, at, "", joined)] = None
            else:
                graph = joined
                rewritings[Rewriting(STEP, at, "attention rotates and writes the new token")] = None
        graphs[graph.name] = graph
    programs = programs.rewritten(lambda graph: graphs[graph.name])
    return replace(programs, rewritings=(*programs.rewritings, *rewritings))


def _joined(programs: Programs, graph: Graph, write: Node, target: Target) -> Graph | str:
    """Returns the graph with one node in place of `write` and its attention, or the reason why the two nodes cannot be
    combined."""
    op = write.op
    assert isinstance(op, RopeWrite)
    queries, *cached = write.outputs
    stored, new = cached[: len(op.stored)], cached[len(op.stored) :]
    readers = [node for ref in (queries, *new) for node in graph.consumers[ref]]
    attend = readers[0] if readers else None
    if op.joined or attend is None or not isinstance(attend.op, CachedBase) or attend.op.values is not None:
        return "another node reads the rotated queries before attention"
    if any(node is not attend for node in readers) or {queries, *new} & {ref for _, ref in graph.outputs}:
        return "several nodes read the rotated queries or the new rows"
    fused = RopeAttention(*attend.op.of_scores, None, op.coded, op.ring, op.neighbors, op.paged)
    expected = dict(zip(fused.attend.names, attend.inputs, strict=False))
    written = (queries, *stored, *new)
    inputs = (*write.inputs, *(expected.get(name, "") for name in fused.further))
    if type(attend.op) is not type(fused.attend) or attend.inputs != tuple(fused.attended(inputs, written)):
        return f"{attend.name} reads other tensors than the cache that is written"
    place = graph.nodes.index(attend)
    between = graph.nodes[graph.nodes.index(write) + 1 : place]
    if any(node_of(ref) == write.name for node in between for ref in node.inputs):
        return "another node reads the cache before attention"
    types = (attend.type, *write.types[1 : 1 + len(op.stored)])
    members = (*(attend.members or (attend.name,)), *write.members)
    node = Node(attend.name, fused, inputs, types, None, members)
    if reason := refusal(CACHED_ATTENTION, site_of(programs, None, graph, node, target)):
        return reason
    nodes = tuple(node if other is attend else other for other in graph.nodes if other is not write)
    return rename(replace(graph, nodes=nodes), dict(zip(stored, node.outputs[1:], strict=True)))
