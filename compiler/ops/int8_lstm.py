"""One time step of an LSTM with an int8 recurrent product."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.linear import rows
from specc.compiler.ops.quantized import (
    FINE,
    LARGEST,
    LARGEST_K,
    Int8Linear,
    Int8Product,
    padded,
    rounded,
    two_codes,
    wide,
)
from specc.compiler.ops.recurrent import GATES, updated
from specc.compiler.records import record


@record
class Int8LstmStep(Int8Product):
    """Computes the next h and c [..., H] of an LSTM with an int8 recurrent product.

    Inputs, in order:
    - h and c: the state [..., H].
    - x: f32 [..., 4H], the input's contribution to the gates.
    - w: i8 [4H, K], the stored codes of the recurrent weight.
    - offset: i32 [4H], added to the int32 sums.
    - scale: f32 [4H], the factor that converts the int32 sums to floats.
    - inverse: f32 [H], the reciprocal of the scale of h.

    h is quantized as `QuantizeRows` does, and padded with zeros after column H. The product of h and w, with the
    offset, is an exact int32 sum. The gates, in the order i, f, g, o, are computed from x + sums * scale. All
    operations after the sums are f32. If h and c have a narrower dtype, the new h and c are rounded once.

    With `bits` 16, h is the sum q1 + q2 / 254 of two int8 codes (see `two_codes`). Both codes are multiplied with w
    exactly. The total, in f32, is the sum for q1, including the offset, plus 1/254 of the sum for q2.
    """

    name: ClassVar[str] = "int8_lstm_step"
    stored: ClassVar[int] = 3
    arity: ClassVar[int] = 7
    output_labels: ClassVar[tuple[str, ...]] = ("h", "c")
    bits: Literal[8, 16] = 8

    @property
    def words(self) -> str:
        return "int8 lstm step" if self.bits == 8 else "int8 lstm step of a 16-bit h"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, f"h{inputs[0].width}{wide(self.bits)}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        h, c, *_ = inputs
        size = h.width
        if not isinstance(size, int) or not h.floating or h != c:
            raise TypeRuleError(f"needs h and c of one float type, not {h} and {c}", (0, 1))
        n, k = GATES * size, padded(size)
        if size % GATES:
            raise TypeRuleError(f"takes a multiple of {GATES} features, but h is {h}", (0,))
        if k > LARGEST_K:
            raise TypeRuleError(f"sums at most {LARGEST_K:,} products in int32, but h is {h}", (0,))
        wanted = (
            TensorType((*rows(h), n), "f32"),
            TensorType((n, k), "i8"),
            TensorType((n,), "i32"),
            TensorType((n,), "f32"),
            TensorType((size,), "f32"),
        )
        names = ("gates of x", "weights", "biases", "scales", "inverses")
        for i, (name, want) in enumerate(zip(names, wanted, strict=True), 2):
            if (inputs[i].shape, inputs[i].dtype) != (want.shape, want.dtype):
                raise TypeRuleError(f"needs {name} {want} for h of {size} features, not {inputs[i]}", (i,))
        return h, c

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        h, weight = inputs[0], inputs[self.stored]
        return 2 * h.with_shape(*rows(h)).count(sizes) * weight.count(sizes) * (self.bits // 8)

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return LARGEST + 1

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Replaces random inputs by test inputs of realistic size. Half of the weight codes become negative, and the
        codes after column H become 0. The scales bring the sums near 1.

        The inverse scales are powers of two, so the codes of the output h are equal in every precision.
        """
        import torch

        h, c, x, weight, offset, scale, inverse = inputs
        weight = weight.clone()
        weight[:, ::2].neg_()
        weight[:, h.shape[-1] :] = 0
        scale = (scale.abs() + 0.5) * (weight.shape[1] ** -0.5 / LARGEST**2)
        return h, c, x, weight, offset, scale, 2.0 ** (torch.arange(len(inverse), device=inverse.device) % 3 + 5)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        h, c, x, weight, offset, scale, inverse = inputs
        values = h.float() * inverse
        first, second = two_codes(values) if self.bits == 16 else (rounded(values), None)
        sums = _sums(first, weight, offset).to(x.dtype)
        if second is not None:
            sums = sums + _sums(second, weight, torch.zeros_like(offset)).to(x.dtype) / FINE
        state = updated(x + sums * scale, c.to(x.dtype))
        return state[0].to(h.dtype), state[1].to(c.dtype)


def _sums(codes: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    sums = Int8Linear().reference(codes, weight[:, : codes.shape[-1]], offset)
    assert not isinstance(sums, tuple)
    return sums
