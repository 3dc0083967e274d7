"""The int8 form of a linear layer. The bias is added to the integer sums. Pointwise nodes that follow join the
epilogue."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from specc.compiler.expr import Binary, Expr, ExprError, Var, cuda_text, reread, substitute
from specc.compiler.int8.editor import Editor, Factor
from specc.compiler.int8.form import Int8Form, sums_of, title_of, weighed
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import Int8Linear
from specc.compiler.ops.shape import CropColumns

WORDS = {"p", "w", "x", "y", "offset", "scale", "inverse", "second"}  # reserved names of the kernel


class Int8LinearForm(Int8Form):
    """Converts `x w^T`, the sum with a bias vector that is stored for int8 products, and the pointwise nodes that
    follow.

    A pointwise node joins the epilogue of the product if no other node reads the result of the preceding node. Each
    other operand of the pointwise node must be a vector [N], or have the shape of the product.
    """

    takes: ClassVar[type[Op]] = Linear

    def factors(self, graph: Graph, node: Node) -> tuple[Factor, ...]:
        if len(node.types) > 1 or node.epilogue is not None or node.inputs[1][0] != "@":
            return ()
        biased = _biased(graph, node)
        return (Factor(node.inputs[1], _other(biased, node.name) if biased else "", (0,)),)

    def rewrite(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        (factor,) = factors
        members, last = [node.name], node
        biased = _biased(edit.graph, node) if factor.bias else None
        if biased is not None and edit.integer(factor.bias):
            last, members = biased, [node.name, biased.name]
            edit.replace(node)
        width = edit.types[factor.weight].shape[0]
        codes, offset, scale = sums_of(edit, factor.weight, factor.bias)
        rows = edit.types[codes].shape[0]
        quantized = edit.codes(node.inputs[0], factor.weight, node)
        expr, operands = weighed(edit, node.name, quantized, factor.weight, (codes, offset, scale), node)
        while (epilogue := _tail(edit, last, operands)) is not None and (
            rows == width or not _operands(epilogue, last)
        ):
            grown = _joined(expr, epilogue, last, operands)
            if grown is None:
                break
            edit.replace(last)
            expr, operands = grown
            last, members = epilogue, [*members, epilogue.name]
        type = last.type
        node_out = Node(
            node.name if rows == width else f"{node.name}.padded",
            Int8Linear(),
            (quantized[0], codes, offset, scale, *operands),
            (type.with_shape(*type.shape[:-1], rows),),
            Pointwise((str(expr),), ("p", "scale", *operands.values()), title=title_of(expr, type)),
            tuple(members),
        )
        ref = edit.add(node_out, last)
        if rows != width:
            assert isinstance(width, int)
            ref = edit.add_op(node.name, CropColumns(width), (ref,), last)
        edit.replace(last, ref)

    def fake_quantize(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        (factor,) = factors
        x, *weights = node.inputs
        edit.add(replace(node, inputs=(*edit.codes(x, factor.weight, node), *weights)), node)
        edit.replace(node)


def _biased(graph: Graph, node: Node) -> Node | None:
    """Returns the node that adds a parameter vector to the product `node`. Returns None if no node adds a parameter
    vector, or if other nodes also read the product."""
    readers = graph.consumers[node.name]
    if graph.uses(node.name) != 1 or not readers:
        return None
    (reader,) = readers
    if not isinstance(reader.op, Pointwise) or len(reader.op.outputs) != 1 or len(reader.inputs) != 2:
        return None
    other = _other(reader, node.name)
    expr = reread(reader.op.outputs[0])
    sums = isinstance(expr, Binary) and expr.op == "+" and isinstance(expr.a, Var) and isinstance(expr.b, Var)
    return reader if sums and other[0] == "@" and graph.types[other].shape == (node.type.width,) else None


def _other(reader: Node, name: str) -> str:
    return next(ref for ref in reader.inputs if ref != name)


def _tail(edit: Editor, last: Node, operands: Mapping[str, str]) -> Node | None:
    """Returns the pointwise node that can join the epilogue after `last`, or None."""
    graph = edit.graph
    readers = graph.consumers[last.name]
    if graph.uses(last.name) != 1 or not readers or not isinstance(readers[0].op, Pointwise):
        return None
    (epilogue,) = readers
    if epilogue.name in edit.gone:  # the node reads two products, and is already in the epilogue of the other product
        return None
    if len(epilogue.types) != 1 or epilogue.type.shape != last.type.shape or epilogue.epilogue is not None:
        return None
    shapes = (last.type.shape, (last.type.width,))
    types = [edit.types[ref] for ref in _operands(epilogue, last)]
    whole = all(type.shape in shapes and type.dtype in ("f32", "bf16", "f16") for type in types)
    return epilogue if whole and not any(edit.integer(ref) for ref in epilogue.inputs) else None


def _operands(epilogue: Node, last: Node) -> list[str]:
    return [ref for ref in epilogue.inputs if ref != last.name]


def _joined(expr: Expr, epilogue: Node, last: Node, operands: Mapping[str, str]) -> tuple[Expr, dict[str, str]] | None:
    """Applies the pointwise node `epilogue` to `expr`, the expression of the node `last`. Returns the new expression,
    and a map from the reference of each operand to its variable. Returns None if the expression cannot be written as
    kernel code."""
    assert isinstance(epilogue.op, Pointwise)
    named = dict(operands)
    swap: dict[str, Expr] = {}
    for variable, ref in zip(epilogue.op.variables, epilogue.inputs, strict=True):
        if ref == last.name:
            swap[variable] = expr
            continue
        name = variable  # named by role, so that nodes that read different biases share a kernel
        while name in WORDS or any(name == taken and other != ref for other, taken in named.items()):
            name += "_"
        swap[variable] = Var(named.setdefault(ref, name))
    grown = substitute(reread(epilogue.op.outputs[0]), swap)
    try:
        cuda_text(grown), title_of(grown, epilogue.type)
    except ExprError:
        return None
    return grown, named


INT8_LINEAR = Int8LinearForm("int8_linear")
