"""Joins a pointwise node into the matrix products that feed it: it becomes their epilogue, computed before the
store."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.linear import Linear, Product
from specc.compiler.ops.pointwise import Pointwise


def join_tails(graph: Graph) -> Graph:
    """Every pointwise node with a product that only it reads becomes that product's epilogue.

    Several linear layers of one input that feed one pointwise node become one node with an accumulator each. One that
    reads a single number, such as the gradient of a loss, stays: it scales what is small, and the library is left the
    product.
    """
    for tail in graph.nodes:
        scales = any(not graph.types[ref].shape for ref in tail.inputs)
        if isinstance(tail.op, Pointwise) and not scales and (products := _products(graph, tail)):
            return join_tails(_joined(graph, tail, products))
    return graph


def _products(graph: Graph, tail: Node) -> tuple[Node, ...]:
    """The products whose only reader is `tail`, as far as one kernel can compute them together."""
    found = [
        node
        for ref in tail.inputs
        if (node := graph.by_name.get(node_of(ref))) is not None
        and isinstance(node.op, Product)
        and node.epilogue is None
        and graph.uses(ref) == 1
    ]
    if len(found) > 1 and not (all(node.op == Linear() for node in found) and len({n.inputs[0] for n in found}) == 1):
        return tuple(found[:1])
    return tuple(found)


def _joined(graph: Graph, tail: Node, products: tuple[Node, ...]) -> Graph:
    first = products[0]
    op = replace(first.op, weights=len(products)) if isinstance(first.op, Linear) else first.op
    assert isinstance(tail.op, Pointwise)
    names = dict(zip(tail.inputs, tail.op.variables, strict=True))
    accumulators = [product.name for product in products]
    operands = [ref for ref in tail.inputs if ref not in accumulators]
    variables = tuple(names[ref] for ref in (*accumulators, *operands))
    weights = tuple(product.inputs[1] for product in products)
    node = Node(
        first.name,
        op,
        (first.inputs[0], *weights, *operands),
        tail.types,
        replace(tail.op, variables=variables, dtype=""),
        (*accumulators, tail.name),
    )
    nodes = tuple(node if old is tail else old for old in graph.nodes if old not in products)
    renamed = dict(zip(tail.outputs, node.outputs, strict=True))
    return rename(replace(graph, nodes=nodes), renamed)
