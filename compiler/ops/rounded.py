"""Fake quantization: training with inputs rounded as int8 products round them, with straight-through gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from specc.compiler.ir.graph import Op, TensorType, TypeRuleError
from specc.compiler.ops.linear import rows
from specc.compiler.ops.quantized import FINE, LARGEST, wide
from specc.compiler.ops.recurrent import GATES, updated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoundRows(Op):
    """Quantizes x [..., K] as `QuantizeRows` does and dequantizes the result.

    x * inverse, for inverse f32 [K], is rounded with ties to even, clamped to [-127, 127] and divided by inverse. NaN
    stays NaN. With `bits` 16, the result is the sum of two codes (`two_codes`).

    The gradient ignores the rounding: it is 1 within [-127, 127] and 0 outside, where the result is constant. This is
    the straight-through estimator (Bengio et al. 2013), clipped as in Jacob et al. 2018.
    """

    name: ClassVar[str] = "round_rows"
    keeps_features: ClassVar[bool] = True
    bits: Literal[8, 16] = 8

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, inverse = inputs
        if not x.floating or inverse.dtype != "f32":
            raise TypeRuleError(f"rounds floats by f32 numbers, not {x} by {inverse}", (0, 1))
        if inverse.shape != (x.width,):
            raise TypeRuleError(f"takes {inverse.shape[0]} features but {{input}} gives {x.width}", (0, 1))
        return (x,)

    def support(self, inputs: Sequence[TensorType]) -> str:
        return f"round_rows{wide(self.bits)}"

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{self.support(inputs)}({', '.join(args)})"

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        x, inverse = inputs
        steps = x * inverse
        within = steps.detach().clamp(-LARGEST, LARGEST)
        nearest = within.round()
        if self.bits == 16:
            nearest = nearest + ((within - nearest) * FINE).round() / FINE
        nearest = nearest / inverse
        inside = steps.detach().abs() <= LARGEST
        return torch.where(inside, x + (nearest - x.detach()), nearest)


@dataclass(frozen=True, slots=True)
class LstmGates(Op):
    """Computes the new h and c [B, H] from the gate sums [B, 4H], in the order i, f, g, o, and the old c [B, H]."""

    name: ClassVar[str] = "lstm_gates"

    @property
    def arity(self) -> int:
        return 2

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "h", "c"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        sums, c = inputs
        if not isinstance(c.width, int) or sums.shape != (*rows(c), GATES * c.width):
            raise TypeRuleError(f"updates {c} by four gates a feature, not {sums}", (0, 1))
        return c, c

    def support(self, inputs: Sequence[TensorType]) -> str:
        return self.name

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{self.name}({', '.join(args)})"

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return updated(*inputs)
