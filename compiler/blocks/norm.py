"""The norms that a block may start with."""

from typing import Literal

from specc.compiler.blocks.init import constant
from specc.compiler.blocks.parts import Norm
from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.norm import LayerNorm, RmsNorm
from specc.compiler.strict import PositiveFloat


class Rms(Norm):
    """RMSNorm.

    Attributes:
        eps: the epsilon added to the mean square.
        affine: whether a learned weight multiplies the result.
    """

    kind: Literal["rms"]
    eps: PositiveFloat = 1e-6
    affine: bool = False

    def normalize(self, b: Builder, x: str, name: str) -> str:
        if not self.affine:
            return b.add(name, RmsNorm(self.eps), (x,))
        weight = b.param("norm_weight", TensorType((b.types[x].width,), b.types[x].dtype), constant(1.0))
        return b.add(name, RmsNorm(self.eps, affine=True), (x, weight))


class Layer(Norm):
    """LayerNorm with a learned weight and bias.

    Attributes:
        eps: the epsilon added to the variance.
    """

    kind: Literal["layer"]
    eps: PositiveFloat = 1e-5

    def normalize(self, b: Builder, x: str, name: str) -> str:
        features = TensorType((b.types[x].width,), b.types[x].dtype)
        weight, bias = b.param("norm_weight", features, constant(1.0)), b.param("norm_bias", features, constant(0.0))
        return b.add(name, LayerNorm(self.eps), (x, weight, bias))
