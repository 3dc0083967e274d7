"""One step of an LSTM whose recurrent product is of int8 codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir import Sizes, TensorType, TypeRuleError
from specc.compiler.ops.linear import rows
from specc.compiler.ops.quantized import LARGEST, LARGEST_K, Int8Linear, Int8Product, QuantizeRows, padded
from specc.compiler.ops.recurrent import GATES, updated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int8LstmStep(Int8Product):
    """The next h and c [..., H] of an LSTM. Inputs are h and c; x f32 [..., 4H], what the step's input adds to the
    gates; and of the product with h the stored codes w i8 [4H, K], offset i32 [4H], scale f32 [4H] and inverse f32 [H].

    h becomes codes as `QuantizeRows` makes them, zeros behind column H; their sums with w are exact in int32, offset
    included. The gates, in the order i, f, g, o, are of x + sums * scale. Beyond the sums all of it is f32, and h and c
    are rounded once where they are narrower.
    """

    name: ClassVar[str] = "int8_lstm_step"
    stored: ClassVar[int] = 3

    @property
    def arity(self) -> int:
        return 7

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "h", "c"

    @property
    def words(self) -> str:
        return "int8 lstm step"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, f"h{inputs[0].width}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        h, c, x, weight, offset, scale, inverse = inputs
        size = h.width
        if not isinstance(size, int) or not h.floating or h != c:
            raise TypeRuleError(f"takes h and c of floats alike, not {h} and {c}", (0, 1))
        n, k = GATES * size, padded(size)
        if size % GATES:
            raise TypeRuleError(f"wants a multiple of {GATES} features, and h is {h}", (0,))
        if k > LARGEST_K:
            raise TypeRuleError(f"sums at most {LARGEST_K:,} products in int32, and h is {h}", (0,))
        wanted = (
            TensorType((*rows(h), n), "f32"),
            TensorType((n, k), "i8"),
            TensorType((n,), "i32"),
            TensorType((n,), "f32"),
            TensorType((size,), "f32"),
        )
        names = ("the gates of x are", "the weight is", "the bias is", "the scale is", "the inverse is")
        given = (x, weight, offset, scale, inverse)
        for i, (words, have, want) in enumerate(zip(names, given, wanted, strict=True), 2):
            if (have.shape, have.dtype) != (want.shape, want.dtype):
                raise TypeRuleError(f"of {size} features wants {want}, but {words} {have}", (i,))
        return h, c

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        h, weight = inputs[0], inputs[self.stored]
        return 2 * h.with_shape(*rows(h)).count(sizes) * weight.count(sizes)

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return LARGEST + 1

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Codes of both signs, with zeros behind column H; scales that bring sums near 1; inverses that are powers of
        two, so that h has the same codes in every precision."""
        import torch

        h, c, x, weight, offset, scale, inverse = inputs
        weight = weight.clone()
        weight[:, ::2].neg_()
        weight[:, h.shape[-1] :] = 0
        scale = (scale.abs() + 0.5) * (weight.shape[1] ** -0.5 / LARGEST**2)
        return h, c, x, weight, offset, scale, 2.0 ** (torch.arange(len(inverse), device=inverse.device) % 3 + 5)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        h, c, x, weight, offset, scale, inverse = inputs
        codes = QuantizeRows(weight.shape[1]).reference(h, inverse)
        assert not isinstance(codes, tuple)
        sums = Int8Linear().reference(codes, weight, offset)
        assert not isinstance(sums, tuple)
        made = updated(x + sums.to(x.dtype) * scale, c.to(x.dtype))
        return made[0].to(h.dtype), made[1].to(c.dtype)
