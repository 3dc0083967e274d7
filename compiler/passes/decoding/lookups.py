"""Combines the embeddings and rotary angles of new tokens into one op, in decoding steps."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, rename
from specc.compiler.kernels.kernel import refusal
from specc.compiler.kernels.norm_rope.lookups import LOOKUPS_TRITON
from specc.compiler.ops.caches.paged_attention import PackedPositions, PackTexts
from specc.compiler.ops.decoding.lookups import Lookups
from specc.compiler.ops.positions import Positions, RopeRows
from specc.compiler.ops.shape import Embedding
from specc.compiler.passes.select_kernels import site_of
from specc.compiler.programs.programs import Programs
from specc.compiler.targets import Target


def lookups(programs: Programs, target: Target) -> Programs:
    """Returns the programs with one `Lookups` node per program in place of the lookups of embeddings and rotary angles.

    A lookup is combined with the other lookups if it reads ids or positions that are known at the start of a program. A
    lookup of embeddings is combined only if its table is a parameter. If the kernel does not accept the combined node,
    the program is unchanged.

    Args:
        programs: The programs that append one token to each text, after `rope_writes`.
        target: The target, whose kernel must accept the new nodes.
    """
    return replace(programs, programs=tuple(_rewritten(programs, graph, target) for graph in programs.programs))


def _rewritten(programs: Programs, graph: Graph, target: Target) -> Graph:
    given = {name for name, _ in graph.inputs}
    indices = [node for node in graph.nodes if isinstance(node.op, Positions | PackedPositions | PackTexts)]
    indices = [node for node in indices if given.issuperset(node.inputs)]
    known = given | {node.name for node in indices}
    rows = [n for n in graph.nodes if isinstance(n.op, Embedding) and n.inputs[0] in known and n.inputs[1][0] == "@"]
    angles = [node for node in graph.nodes if isinstance(node.op, RopeRows) and node.inputs[0] in known]
    members = (*rows, *angles)
    if len(members) < 2:
        return graph
    labels = [*(node.name.replace(".", "_") for node in rows)]
    for i, node in enumerate(angles):
        labels += [f"{node.name.replace('.', '_')}_{word}" if i else word for word in node.op.output_labels]
    ropes = tuple((op.dims, op.base, op.context) for op in (node.op for node in angles) if isinstance(op, RopeRows))
    joined = Node(
        members[0].name,
        Lookups(len(rows), ropes, tuple(labels)),
        tuple(ref for node in members for ref in node.inputs),
        tuple(type for node in members for type in node.types),
        None,
        tuple(node.name for node in rows),
    )
    if refusal(LOOKUPS_TRITON, site_of(programs, None, graph, joined, target)):
        return graph
    old = (ref for node in members for ref in node.outputs)
    rest = replace(graph, nodes=tuple(node for node in graph.nodes if node not in (*members, *indices)))
    named = rename(rest, dict(zip(old, joined.outputs, strict=True)))
    return replace(named, nodes=(*indices, joined, *named.nodes))
