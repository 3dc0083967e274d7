"""Normalization over the last dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Input, Op, Sizes, TensorType, Traced, TypeRuleError, spelled

if TYPE_CHECKING:
    from torch import Tensor


def _check(inputs: Sequence[TensorType]) -> TensorType:
    x, *learned = inputs
    for i, weight in enumerate(learned, 1):
        if weight.shape != (x.width,):
            raise TypeRuleError(f"scales {weight.shape} but {{input}} gives {x.width} features", (0, i))
    return x


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """Computes x / sqrt(mean(x^2) + eps), times a weight [D] if `affine` (Zhang and Sennrich, 2019)."""

    name: ClassVar[str] = "rms_norm"
    keeps_features: ClassVar[bool] = True
    eps: float = 1e-6
    affine: bool = False

    @property
    def arity(self) -> int:
        return 2 if self.affine else 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (_check(inputs),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * outputs[0].count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        weight = f", {args[1]}" if self.affine else ""
        return f"F.rms_norm({args[0]}, ({spelled(inputs[0].width)},){weight}, eps={self.eps})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        weight = (("weight", Input(1)),) if self.affine else ()  # torch.fx records it by keyword
        return Traced("rms_norm", (Input(0), (inputs[0].width,)), (*weight, ("eps", self.eps)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x, *weight = inputs
        y = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return y * weight[0] if weight else y


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """Computes (x - mean) / sqrt(variance + eps), times a weight [D], plus a bias [D] (Ba, Kiros and Hinton, 2016)."""

    name: ClassVar[str] = "layer_norm"
    keeps_features: ClassVar[bool] = True
    eps: float = 1e-5

    @property
    def arity(self) -> int:
        return 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (_check(inputs),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 7 * outputs[0].count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"F.layer_norm({args[0]}, ({spelled(inputs[0].width)},), {args[1]}, {args[2]}, eps={self.eps})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        learned = (("weight", Input(1)), ("bias", Input(2)))  # torch.fx records them by keyword
        return Traced("layer_norm", (Input(0), (inputs[0].width,)), (*learned, ("eps", self.eps)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x, weight, bias = inputs
        centered = x - x.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight + bias
