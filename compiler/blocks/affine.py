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
        b: the builder of the function or program.
        x: the input, [..., K].
        name: the name of the parameter W and of the product's node. The bias is the parameter `name`_bias [N], which
            starts at 0. The node of the sum is `name`.biased.
        size: the dims [N, K] of W.
        shape: the sizes of the model.
        bias: whether to add a bias, or the names of the matrices that have a bias.
        init: the initialization of W; that of the model's matrices if unset.
    """
    weight = b.param(name, shape.activation(*size), init or shape.matrix_init)
    product = b.add(name, Linear(), (x, weight))
    if name not in bias if isinstance(bias, Collection) else not bias:
        return product
    vector = b.param(f"{name}_bias", shape.activation(size[0]), constant(0.0))
    return pointwise(b, f"{name}.biased", "x + bias", x=product, bias=vector)
