"""RMSNorm and LayerNorm."""

from typing import Literal

from specc.compiler.blocks.parts import WEIGHTLESS, Norm, NormWeight
from specc.compiler.ir.op import Op
from specc.compiler.ops.norm import LayerNorm, RmsNorm
from specc.compiler.strict import PositiveFloat, later


def norm_op(kind: Literal["rms", "layer"], eps: float, weight: str, bias: bool) -> Op:
    weighted = weight != WEIGHTLESS
    return RmsNorm(eps, weighted) if kind == "rms" else LayerNorm(eps, weighted, bias)


class Rms(Norm):
    """RMSNorm.

    Attributes:
        eps: the epsilon added to the mean square.
    """

    kind: Literal["rms"]
    eps: PositiveFloat = 1e-6

    @property
    def op(self) -> Op:
        return norm_op(self.kind, self.eps, self.weight, self.bias)


class Layer(Norm):
    """LayerNorm.

    Attributes:
        eps: the epsilon added to the variance.
    """

    kind: Literal["layer"]
    eps: PositiveFloat = 1e-5
    weight: NormWeight = later("w")
    bias: bool = later(True)

    @property
    def op(self) -> Op:
        return norm_op(self.kind, self.eps, self.weight, self.bias)
