"""Exclusive self-attention, which removes from each token's output the component along the token's own value."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import SupportCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError


class Exclusive(SupportCall):
    """Exclusive self-attention: y - (y . u) u with u = v / |v| (XSA, arXiv 2603.09078).

    y [B, T, H, C] is the attention output and v [B, T, G, C] the value of the same token, where G divides H. Query
    head h uses value head h // (H / G).
    """

    name: ClassVar[str] = "exclusive"
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        y, v = inputs
        heads, groups = y.shape[-2], v.shape[-2]
        assert isinstance(heads, int) and isinstance(groups, int)
        if heads % groups or y.with_shape(*y.shape[:-2], groups, y.width) != v:
            raise TypeRuleError(f"cannot remove values {v} from outputs {y}: the shapes do not fit", (0, 1))
        return (y,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes) + 3 * inputs[1].count(sizes)

    def saved_inside(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        y, v = inputs  # Torch saves u, the length of v, and y . u
        return v.bytes(sizes) + sum(type.with_shape(*type.shape[:-1]).bytes(sizes) for type in (v, y))

    def reference(self, *inputs: Tensor) -> Tensors:
        y, v = inputs
        v = v.repeat_interleave(y.shape[-2] // v.shape[-2], dim=-2)
        along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True)
        return y - along * v
