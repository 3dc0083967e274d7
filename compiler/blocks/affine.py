"""The matrix of a part, with or without a vector behind it."""

from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.init import Init, constant
from specc.compiler.ir.graph import Builder, Dim
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise


def affine(b: Builder, x: str, name: str, size: tuple[Dim, Dim], shape: Shape, init: Init, bias: bool) -> str:
    """x W^T, plus a bias from 0 where there is one: parameters `name` of `size` [N, K] and `name`_bias [N]. The node is
    `name`, its sum with the bias `name`.biased."""
    weight = b.param(name, shape.activation(*size), init)
    product = b.add(name, Linear(), (x, weight))
    if not bias:
        return product
    vector = b.param(f"{name}_bias", shape.activation(size[0]), constant(0.0))
    return b.add(f"{name}.biased", Pointwise(("x + bias",), ("x", "bias")), (product, vector))
