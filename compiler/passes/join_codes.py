"""Makes the kernel of a matrix product write 8-bit codes of the result, if another product multiplies these codes."""

from dataclasses import replace

from specc.compiler.expr import reread, substitute
from specc.compiler.ir.builder import underscored
from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.fp8_codes import Fp8Codes
from specc.compiler.ops.linear import Product
from specc.compiler.ops.pointwise import Pointwise


def join_codes(graph: Graph) -> Graph:
    """Moves each node that rounds a product to codes into the epilogue of the product. Returns the new graph.

    The unrounded result remains an output only if another node reads it.
    """
    for node in graph.nodes:
        if not isinstance(node.op, Fp8Codes):
            continue
        source = graph.by_name.get(node_of(node.inputs[0]))
        if source is None or not isinstance(source.op, Product) or not isinstance(source.epilogue, Pointwise):
            continue
        if source.types[source.outputs.index(node.inputs[0])].floating:
            return join_codes(_joined(graph, source, node))
    return graph


def _joined(graph: Graph, source: Node, codes: Node) -> Graph:
    op, rounding = source.epilogue, codes.op
    assert isinstance(op, Pointwise) and isinstance(rounding, Fp8Codes)
    i = source.outputs.index(codes.inputs[0])
    labels = list(op.labels or ("y",) * len(op.outputs))
    taken = {*op.variables, *labels}
    state = underscored("state", taken)
    outputs, types, index = list(op.outputs), list(source.types), i
    if graph.uses(codes.inputs[0]) > 1:
        saved = {name: reread(text) for name, text in zip(labels[1:], outputs[1:], strict=True)}
        saved = {name: text for name, text in saved.items() if name not in op.variables}
        index = len(outputs)
        outputs.append(str(substitute(reread(outputs[i]), saved) if i == 0 else reread(outputs[i])))
        labels.append(underscored(f"{labels[i]}_codes", taken))
        types.append(codes.type)
    else:
        types[i] = codes.type
    entry = (index, state, rounding.factor, source.types[i].dtype)
    title = op.title if op.title.endswith("_codes") else f"{op.title}_codes" if op.title else ""
    joined = replace(
        op,
        outputs=tuple(outputs),
        variables=(*op.variables, state),
        labels=tuple(labels) if len(outputs) > 1 else op.labels,
        title=title,
        codes=(*op.codes, entry),
    )
    node = replace(
        source,
        inputs=(*source.inputs, codes.inputs[1]),
        types=tuple(types),
        epilogue=joined,
        members=(*source.members, codes.name),
    )
    nodes = tuple(node if old is source else old for old in graph.nodes if old is not codes)
    return rename(replace(graph, nodes=nodes), {codes.name: node.outputs[index]})
