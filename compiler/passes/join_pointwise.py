"""Joins pointwise nodes that follow a matrix product, such as the sum of a product and a bias, and an activation.

A product has a single epilogue, which then computes all of them."""

from collections.abc import Sequence
from dataclasses import replace

from specc.compiler.expr import Expr, Var, reread, substitute
from specc.compiler.ir.builder import underscored
from specc.compiler.ir.graph import Node
from specc.compiler.ops.pointwise import Pointwise


def join_pointwise(nodes: Sequence[Node], products: set[str]) -> tuple[Node, ...]:
    """Joins each pointwise node that reads a product with its reader, if this is a single pointwise node of equal
    shape.

    Args:
        nodes: The nodes of a group, in order.
        products: The names of the matrix products among them.

    Returns:
        The nodes. A joined node has the name of the reader, and its variable for the product.
    """
    for inner in nodes:
        if _is_plain(inner) and (of := [ref for ref in inner.inputs if ref in products]):
            readers = [node for node in nodes if inner.name in node.inputs]
            if len(readers) == 1 and _is_plain(readers[0]) and _fits(inner, readers[0]):
                joined = _joined(inner, readers[0], of[0])
                rest = (joined if node is readers[0] else node for node in nodes if node is not inner)
                return join_pointwise(tuple(rest), products)
    return tuple(nodes)


def _is_plain(node: Node) -> bool:
    """Returns whether a node is a pointwise node with one output, and without masks, scales or codes."""
    op = node.op
    return isinstance(op, Pointwise) and len(op.outputs) == 1 and not (op.draws or op.scales or op.codes)


def _fits(inner: Node, reader: Node) -> bool:
    """Returns whether `reader` computes in the shape and the dtype of `inner`, and reads each value once."""
    assert isinstance(inner.op, Pointwise) and isinstance(reader.op, Pointwise)
    alike = inner.type.shape == reader.type.shape and inner.op.dtype in ("", reader.op.dtype)
    return alike and len(set(reader.inputs)) == len(reader.inputs)


def _joined(inner: Node, reader: Node, product: str) -> Node:
    before, after = inner.op, reader.op
    assert isinstance(before, Pointwise) and isinstance(after, Pointwise)
    known = dict(zip(reader.inputs, after.variables, strict=True))
    variable, taken = known[inner.name], {*after.variables}
    if product not in known:  # the product takes the place of `inner`, as the first input determines the dtype
        known = {product if ref == inner.name else ref: name for ref, name in known.items()}
    known.pop(inner.name, None)
    renamed: dict[str, Expr] = {}
    for ref, name in zip(inner.inputs, before.variables, strict=True):
        if ref not in known:
            known[ref] = underscored(f"{variable}_{name}" if name in taken else name, taken)
        renamed[name] = Var(known[ref])
    text = str(substitute(reread(after.outputs[0]), {variable: substitute(reread(before.outputs[0]), renamed)}))
    op = replace(after, outputs=(text,), variables=tuple(known.values()))
    members = (*(inner.members or (inner.name,)), *(reader.members or (reader.name,)))
    return replace(reader, op=op, inputs=tuple(known), members=members)
