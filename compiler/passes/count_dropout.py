"""Makes the dropout of a text model independent of the numbers of processes and micro-batches."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.dropout import DRAW, Dropout
from specc.compiler.ops.region import Call
from specc.compiler.programs.programs import Programs

SUFFIX = "_draw"  # the name suffix of the buffers


def count_dropout(programs: Programs, text: bool) -> Programs:
    """Returns the programs with one buffer per dropout node. The buffer determines the random numbers.

    The trainer sets the buffers before each micro-batch. The name of a buffer is the name of its node, followed by
    `_draw`. Models that do not read text still use Torch's generator. In these models, the lengths of sources and
    targets vary between batches, and loops over time draw new numbers in each step.

    Args:
        programs: The programs, before any fusion.
        text: Whether the model reads text.
    """
    if not text or not any(isinstance(node.op, Dropout) for graph in programs.graphs for node in graph.nodes):
        return programs
    places: dict[str, list[str]] = {program.name: [""] for program in programs.programs}
    for program in programs.programs:
        for node in program.nodes:
            if isinstance(node.op, Call):
                places.setdefault(node.op.callee, []).append(f"{node.op.at}.")
    buffers = {
        f"{at}{node.name}{SUFFIX}": DRAW
        for graph in programs.graphs
        for node in graph.nodes
        if isinstance(node.op, Dropout)
        for at in places.get(graph.name, ())
    }
    return replace(programs.rewritten(_counted), buffers=(*programs.buffers, *buffers.items()))


def _counted(graph: Graph) -> Graph:
    names = [node.name for node in graph.nodes if isinstance(node.op, Dropout)]
    if not names:
        return graph

    def change(node: Node) -> Node:
        if not isinstance(node.op, Dropout):
            return node
        return replace(node, op=replace(node.op, counted=True), inputs=(*node.inputs, f"@{node.name}{SUFFIX}"))

    params = (*graph.params, *((f"{name}{SUFFIX}", DRAW) for name in names))
    return replace(graph, nodes=tuple(map(change, graph.nodes)), params=params)
