"""Normalization over the last dim."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record


def _check(inputs: Sequence[TensorType]) -> TensorType:
    x, *learned = inputs
    for i, weight in enumerate(learned, 1):
        if weight.shape != (x.width,):
            raise TypeRuleError(f"has a weight of shape {weight.shape}, but {{input}} gives {x.width} features", (0, i))
    return x


@record
class RmsNorm(Op):
    """Computes x / sqrt(mean(x^2) + eps), times a weight [D] if `affine` (Zhang and Sennrich, 2019)."""

    name: ClassVar[str] = "rms_norm"
    keeps_features: ClassVar[bool] = True
    flops_per_output: ClassVar[int] = 4
    eps: float = 1e-6
    affine: bool = False

    @property
    def arity(self) -> int:
        return 2 if self.affine else 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (_check(inputs),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        weight = (Input(1),) if self.affine else ()
        return TorchCall("F.rms_norm", (Input(0), (inputs[0].width,), *weight), (("eps", self.eps),))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, *weight = inputs
        y = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return y * weight[0] if weight else y


@record
class LayerNorm(Op):
    """Computes (x - mean) / sqrt(variance + eps), times a weight [D] if `weight`, plus a bias [D] if `bias` (Ba, Kiros
    and Hinton, 2016)."""

    name: ClassVar[str] = "layer_norm"
    keeps_features: ClassVar[bool] = True
    flops_per_output: ClassVar[int] = 7
    eps: float = 1e-5
    weight: bool = True
    bias: bool = True

    @property
    def arity(self) -> int:
        return 1 + self.weight + self.bias

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (_check(inputs),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        weight = (Input(1) if self.weight else None,) if self.weight or self.bias else ()
        learned = (*weight, Input(self.arity - 1)) if self.bias else weight
        return TorchCall("F.layer_norm", (Input(0), (inputs[0].width,), *learned), (("eps", self.eps),))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, *learned = inputs
        centered = x - x.mean(-1, keepdim=True)
        y = centered * (centered.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y = y * learned[0] if self.weight else y
        return y + learned[-1] if self.bias else y
