"""Turns a pointwise node into the epilogue of the matrix products that it reads. A kernel computes the epilogue before
it stores its result."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.linear import Linear, Product
from specc.compiler.ops.pointwise import Pointwise


def join_epilogues(graph: Graph) -> Graph:
    """Returns the graph, in which every pointwise node that is the only reader of a product has become the epilogue of
    the product.

    If a pointwise node reads several linear layers of the same input, they become one node with several accumulators. A
    pointwise node that reads a scalar, e.g. the gradient of a loss, is not joined. Such a node only scales a small
    tensor, and the product can remain a library call.
    """
    for epilogue in graph.nodes:
        scales = any(not graph.types[ref].shape for ref in epilogue.inputs)
        if isinstance(epilogue.op, Pointwise) and not scales and (products := _products(graph, epilogue)):
            return join_epilogues(_joined(graph, epilogue, products))
    return graph


def _products(graph: Graph, epilogue: Node) -> tuple[Node, ...]:
    """Returns the products that only `epilogue` reads and that one kernel can compute."""
    products = [
        node
        for ref in epilogue.inputs
        if (node := graph.by_name.get(node_of(ref))) is not None
        and isinstance(node.op, Product)
        and node.epilogue is None
        and graph.uses(ref) == 1
    ]
    if len(products) > 1 and not (
        all(node.op == Linear() for node in products) and len({n.inputs[0] for n in products}) == 1
    ):
        return tuple(products[:1])
    return tuple(products)


def _joined(graph: Graph, epilogue: Node, products: tuple[Node, ...]) -> Graph:
    first = products[0]
    op = replace(first.op, weights=len(products)) if isinstance(first.op, Linear) else first.op
    assert isinstance(epilogue.op, Pointwise)
    names = dict(zip(epilogue.inputs, epilogue.op.variables, strict=True))
    accumulators = [product.name for product in products]
    operands = [ref for ref in epilogue.inputs if ref not in accumulators]
    variables = tuple(names[ref] for ref in (*accumulators, *operands))
    inputs = (first.inputs[0], *(product.inputs[1] for product in products), *operands)
    joined = replace(epilogue.op, variables=variables, dtype="")
    node = Node(first.name, op, inputs, epilogue.types, joined, (*accumulators, epilogue.name))
    nodes = tuple(node if old is epilogue else old for old in graph.nodes if old not in products)
    renamed = dict(zip(epilogue.outputs, node.outputs, strict=True))
    return rename(replace(graph, nodes=nodes), renamed)
