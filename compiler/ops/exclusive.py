"""Exclusive self-attention: removes from the attention output of a token the component along its own value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Op, Sizes, TensorType, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Exclusive(Op):
    """Computes y - (y . u) u with u = v / |v| (XSA, arXiv 2603.09078).

    y [B, T, H, C] is the attention output and v [B, T, G, C] the value of the same token, where G divides H. Query head
    h uses value head h // (H / G).
    """

    name: ClassVar[str] = "exclusive"
    keeps_features: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        y, v = inputs
        heads, groups = y.shape[-2], v.shape[-2]
        assert isinstance(heads, int) and isinstance(groups, int)
        if heads % groups or y.with_shape(*y.shape[:-2], groups, y.width) != v:
            raise TypeRuleError(f"takes values {v} out of {y}", (0, 1))
        return (y,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes) + 3 * inputs[1].count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"exclusive({', '.join(args)})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "exclusive"

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        y, v = inputs
        v = v.repeat_interleave(y.shape[-2] // v.shape[-2], dim=-2)
        along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True)
        return y - along * v
