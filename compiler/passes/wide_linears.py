"""Replaces linear layers whose bf16 input is converted to f32. The new layers read the bf16 input directly."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.linear import Linear, WideLinear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.programs.programs import Programs


def wide_linears(programs: Programs) -> Programs:
    """Returns the programs with WideLinear layers. A WideLinear takes the place of a linear layer whose matrix is f32,
    and whose input is a bf16 value that is converted to f32. The router of a mixture of experts is such a layer.

    A layer is not changed if another node reads the converted value, because the value is then stored in f32 anyway.
    """
    return programs.rewritten(_widened)


def _widened(graph: Graph) -> Graph:
    removed: set[str] = set()
    nodes: list[Node] = []
    for node in graph.nodes:
        source = _narrow(graph, node)
        if source is not None:
            removed.add(node.inputs[0])
            node = replace(node, op=WideLinear(), inputs=(source, node.inputs[1]))
        nodes.append(node)
    return replace(graph, nodes=tuple(node for node in nodes if node.name not in removed)) if removed else graph


def _narrow(graph: Graph, node: Node) -> str | None:
    """Returns the reference of a bf16 value if `node` is a linear layer that reads this value in f32. Returns None if
    `node` is no such layer, or if another node also reads the f32 value."""
    if not isinstance(node.op, Linear) or len(node.inputs) != 2:
        return None
    cast = graph.by_name.get(node.inputs[0])
    if cast is None or not isinstance(cast.op, Pointwise) or graph.uses(cast.name) > 1:
        return None
    (text, *more), source = cast.op.outputs, cast.inputs[0]
    converts = not more and cast.op.variables == (text,) and cast.type.dtype == "f32"
    return source if converts and graph.types[source].dtype == "bf16" else None
