"""The norms of a model's layers and of its last value."""

from typing import Literal

from specc.compiler.blocks.parts import WEIGHTLESS, Norm, NormWeight
from specc.compiler.ir.graph import Op
from specc.compiler.ops.norm import LayerNorm, RmsNorm
from specc.compiler.strict import PositiveFloat, later


class Rms(Norm):
    """RMSNorm.

    Attributes:
        eps: the epsilon added to the mean square.
    """

    kind: Literal["rms"]
    eps: PositiveFloat = 1e-6

    @property
    def op(self) -> Op:
        return RmsNorm(self.eps, self.weight != WEIGHTLESS)


class Layer(Norm):
    """LayerNorm.

    Attributes:
        eps: the epsilon added to the variance.
        bias: whether a learned number per feature is added, from 0.
    """

    kind: Literal["layer"]
    eps: PositiveFloat = 1e-5
    weight: NormWeight = later("w")
    bias: bool = later(True)

    @property
    def op(self) -> Op:
        return LayerNorm(self.eps, self.weight != WEIGHTLESS, self.bias)
