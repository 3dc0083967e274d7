"""A matrix product with an optional bias."""

from collections.abc import Collection

from specc.compiler.blocks.context import Shape
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import Dim
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.programs.init import Init, constant


def affine(
    b: Builder,
    x: str,
    name: str,
    size: tuple[Dim, Dim],
    shape: Shape,
    bias: bool | Collection[str],
    init: Init | None = None,
) -> str:
    """Adds the nodes of the product x W^T and, if `bias` is set, of the sum with a bias. Returns the result.

    Args:
        b: The builder of the function or program.
        x: The input, [..., K].
        name: The name of the parameter W and of the product's node. The bias is the parameter `name`_bias [N],
            initially 0. The node of the sum is `name`.biased.
        size: The dims [N, K] of W.
        shape: The sizes of the model.
        bias: Whether to add a bias, or the names of the matrices with a bias.
        init: The initialization of W. By default, the initialization of the model's matrices.
    """
    weight = b.param(name, shape.activation(*size), init or shape.matrix_init)
    product = b.add(name, Linear(), (x, weight))
    if name not in bias if isinstance(bias, Collection) else not bias:
        return product
    vector = b.param(f"{name}_bias", shape.activation(size[0]), constant(0.0))
    return pointwise(b, f"{name}.biased", "x + bias", x=product, bias=vector)
