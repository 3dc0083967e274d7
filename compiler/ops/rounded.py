"""Fake quantization: training rounds inputs exactly as deployed int8 products do. Gradients ignore the rounding."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from specc.compiler.ir.op import Op, SupportCall
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.linear import rows
from specc.compiler.ops.quantized import FINE, LARGEST, check_scales, wide
from specc.compiler.ops.recurrent import GATES, updated
from specc.compiler.records import record


@record
class RoundRows(Op):
    """Quantizes x [..., K] as `QuantizeRows` does, and dequantizes the result.

    x * inverse, for inverse f32 [K], is rounded with ties to even, clamped to [-127, 127] and divided by inverse. NaN
    stays NaN. With `bits` 16, a second code also represents the remainder (see `two_codes`).

    The gradient is 1 where x * inverse is within [-127, 127], and 0 outside, where the result is constant. This is the
    straight-through estimator (Bengio et al. 2013), clipped as in Jacob et al. 2018.
    """

    name: ClassVar[str] = "round_rows"
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 2
    bits: Literal[8, 16] = 8

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        check_scales(*inputs)
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(f"round_rows{wide(self.bits)}", (Input(0), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
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


class LstmGates(SupportCall):
    """Computes the new h and c [B, H] from the old c [B, H] and the gate sums [B, 4H], in the order i, f, g, o."""

    name: ClassVar[str] = "lstm_gates"
    arity: ClassVar[int] = 2
    output_labels: ClassVar[tuple[str, ...]] = ("h", "c")

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        sums, c = inputs
        if not isinstance(c.width, int) or sums.shape != (*rows(c), GATES * c.width):
            raise TypeRuleError(f"the cell {c} needs {GATES} gate sums per feature, not {sums}", (0, 1))
        return c, c

    def reference(self, *inputs: Tensor) -> Tensors:
        return updated(*inputs)
