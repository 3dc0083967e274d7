"""The base class of int8 forms. An int8 form computes an op with int8 weights."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.expr import Expr, name_of, reread, substitute, variables
from specc.compiler.int8.editor import Editor, Factor
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import FINE, Int8Linear, padded
from specc.compiler.records import record

SCALED = Pointwise(("p * scale",), ("p", "scale"), title="f32")


@record
class Int8Form:
    """The rule that converts the nodes of one op to int8. Each subclass has one instance at module level, which the
    catalogue finds."""

    name: str
    takes: ClassVar[type[Op]]

    def factors(self, graph: Graph, node: Node) -> tuple[Factor, ...]:
        """Returns the matrix products of a node. The result is empty if the node cannot be computed in int8."""
        raise TypeError(f"{type(self).__name__} must override `factors`")

    def rewrite(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces a node whose weights are all int8 by nodes that do the same computation in int8."""
        raise TypeError(f"{type(self).__name__} must override `rewrite`")

    def fake_quantize(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces a node of a training program by float ops that round wherever the nodes of `rewrite` round. For a
        training graph, `edit.codes` returns one reference. This reference refers to the rounded input, which consists
        of floats."""
        raise TypeError(f"{type(self).__name__} must override `fake_quantize`")


def sums_of(edit: Editor, weight: str, bias: str) -> tuple[str, str, str]:
    """Declares the stored tensors of a weight, and returns references to these tensors: codes [N, K] i8, offset [N] i32
    and scale [N] f32. N and K are padded to the multiples that an int8 product requires."""
    n, k = edit.types[weight].shape
    assert isinstance(n, int) and isinstance(k, int)
    rows = padded(n)
    return (
        edit.constant(weight, "codes", TensorType((rows, padded(k)), "i8")),
        edit.constant(weight, "offset", TensorType((rows,), "i32")),
        edit.constant(weight, "scale", TensorType((rows,), "f32")),
    )


def weighed(
    edit: Editor, name: str, codes: Sequence[str], weight: str, held: Sequence[str], at: Node
) -> tuple[Expr, dict[str, str]]:
    """Returns the first part of an int8 product's epilogue: an expression that converts the integer sums `p` of the
    product to floats.

    The product multiplies the first codes of its input by the weight. A 16-bit input has two codes per value. For a
    16-bit input, this function also adds a node that multiplies the second codes by the weight. The expression then
    includes the result of that node, f32 [..., N].

    Args:
        edit: The editor of the graph.
        name: The name of the product. The node for the second codes is named `name`.second.
        codes: The references to the input's codes: one, or two for a 16-bit input.
        weight: The reference to the weight.
        held: The references to the weight's codes, offset and scale.
        at: The original node. New nodes are inserted at its position.

    Returns:
        The expression, and its operands other than `p` and `scale`, as a map from the reference of an operand to its
        variable in the expression.
    """
    first, *second = codes
    if not second:
        return reread("p * scale"), {}
    codes_ref, offset, scale = held
    zeros = edit.constant(weight, "zeros", edit.types[offset])
    rows = edit.types[first].shape[:-1]
    type = TensorType((*rows, edit.types[offset].width), "f32")
    node = Node(
        f"{name}.second", Int8Linear(), (*second, codes_ref, zeros, scale), (type,), SCALED, (f"{name}.second",)
    )
    return reread(f"p * scale + second / {FINE}"), {edit.add(node, at): "second"}


def title_of(expr: Expr, type: TensorType) -> str:
    """Returns the part of a kernel's name after `int8_linear`: `i16` for a 16-bit input, the functions that follow the
    scaling, and the output dtype."""
    words = name_of(substitute(expr, {"scale": reread("1"), "second": reread("0")}))
    wide = "i16" if "second" in variables(expr) else ""
    return "_".join(filter(None, (wide, words, type.dtype)))
