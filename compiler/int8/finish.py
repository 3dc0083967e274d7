"""The last rewrites of graphs with int8 products. Products write codes directly, operands are copied to contiguous
rows, and each epilogue gets a unique title."""

from collections.abc import Iterable
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import Int8Linear, QuantizeRows
from specc.compiler.ops.shape import RowByRow


def finished(graph: Graph) -> Graph:
    """Returns the graph with two changes. If an operand of an int8 product's epilogue has the shape of the product, a
    new node copies the operand to contiguous rows. If only a `QuantizeRows` node reads an int8 product, the product
    itself writes the codes, and the `QuantizeRows` node is removed."""
    return _row_by_row(_requantized(graph))


def with_unique_titles(graphs: Iterable[Graph]) -> tuple[Graph, ...]:
    """Returns the graphs with different titles for different epilogues of int8 products. A title contains neither
    scale factors nor operands, so different epilogues may have had the same title."""
    seen: dict[str, list[tuple[object, ...]]] = {}

    def titled(graph: Graph, node: Node) -> Node:
        epilogue = node.epilogue
        if not isinstance(node.op, Int8Linear) or not isinstance(epilogue, Pointwise):
            return node
        read = [graph.types[ref] for ref in node.inputs[node.op.arity :]]
        kinds = [(type.dtype, type.shape == node.type.shape) for type in read]
        known, signature = seen.setdefault(epilogue.title, []), (epilogue.outputs, epilogue.variables, kinds)
        if signature not in known:
            known.append(signature)
        number = known.index(signature) + 1
        return replace(node, epilogue=replace(epilogue, title=f"{epilogue.title}_{number}")) if number > 1 else node

    return tuple(replace(graph, nodes=tuple(titled(graph, node) for node in graph.nodes)) for graph in graphs)


def _row_by_row(graph: Graph) -> Graph:
    """Copies each epilogue operand that has the shape of its int8 product to contiguous rows, because the kernel
    requires contiguous rows. The operand may be a view, such as features that are repeated over time. Results of int8
    products are not copied, because they are already contiguous."""
    nodes: list[Node] = []
    laid: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node.op, Int8Linear):
            inputs = list(node.inputs)
            for i, ref in enumerate(inputs):
                maker = graph.by_name.get(node_of(ref))
                if i < node.op.arity or graph.types[ref].shape != node.type.shape:
                    continue
                if maker is not None and isinstance(maker.op, Int8Linear):
                    continue
                if ref not in laid:
                    op = RowByRow()
                    laid[ref] = f"{node.name}.{node_of(ref).rpartition('.')[2]}_rows"
                    nodes.append(Node(laid[ref], op, (ref,), op.infer([graph.types[ref]])))
                inputs[i] = laid[ref]
            node = replace(node, inputs=tuple(inputs))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _requantized(graph: Graph) -> Graph:
    """Joins each `QuantizeRows` node with the int8 product that it quantizes, if the product has no other reader."""
    for node in graph.nodes:
        if not isinstance(node.op, QuantizeRows):
            continue
        maker = graph.by_name.get(node_of(node.inputs[0]))
        if maker is None or not isinstance(maker.op, Int8Linear) or graph.uses(maker.name) != 1:
            continue
        epilogue = maker.epilogue
        assert isinstance(epilogue, Pointwise)
        if maker.type.width != node.type.width:
            continue
        text = f"({epilogue.outputs[0]}) * inverse"
        title = f"{epilogue.title.rpartition('_')[0]}_i8".lstrip("_")
        joined = replace(epilogue, outputs=(text,), variables=(*epilogue.variables, "inverse"), title=title)
        inputs, members = (*maker.inputs, node.inputs[1]), (*maker.members, node.name)
        rounded = replace(maker, inputs=inputs, types=(replace(node.type),), epilogue=joined, members=members)
        nodes = tuple(rounded if old is maker else old for old in graph.nodes if old is not node)
        swapped = tuple(
            replace(old, inputs=tuple(maker.name if ref == node.name else ref for ref in old.inputs)) for old in nodes
        )
        return _requantized(replace(graph, nodes=swapped))
    return graph
