"""Integer products: quantization of rows to int8 codes, products with stored codes, and removal of padding."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.linear import rows
from specc.compiler.records import record

LARGEST = 127  # the largest code; -128 is not used, so that codes are symmetric
# The number of steps of the second code per step of the first code. The largest rounding error of the first code, half
# a step, is then 127 steps of the second code.
FINE = 2 * LARGEST
ALIGNMENT = 16  # codes per vector load; K and N of an int8 product are multiples of this number
# For K up to LARGEST_K, the sum of K products and a bias below 2^30 fits in int32.
LARGEST_K = 2**30 // LARGEST**2 // ALIGNMENT * ALIGNMENT


def padded(extent: int) -> int:
    """Rounds `extent` up to a multiple of `ALIGNMENT`."""
    return -(-extent // ALIGNMENT) * ALIGNMENT


def rounded(values: Tensor) -> Tensor:
    """Returns the i8 codes nearest to `values`, with ties to even. NaN becomes 0."""
    import torch

    return values.round().clamp(-LARGEST, LARGEST).nan_to_num(0.0).to(torch.int8)


def two_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes values to 16 bits as two i8 codes. Returns the nearest codes, and the codes of the remainders in units
    of 1 / FINE.

    Values are first clamped to [-LARGEST, LARGEST], so values beyond this range have remainder 0.
    """
    within = values.clamp(-LARGEST, LARGEST)
    first = rounded(within)
    return first, rounded((within - first) * FINE)


def step_of(bits: int) -> float:
    """Returns the step between quantized values, relative to the step of the first code: 1 for 8 bits (one code), and 1
    / FINE for 16 bits (two codes)."""
    return 1.0 if bits == 8 else 1.0 / FINE


def wide(bits: int) -> str:
    """Returns a suffix for names: the number of bits of an input, such as `_i16`. The result is empty for 8 bits."""
    return "" if bits == 8 else f"_i{bits}"


def check_scales(x: TensorType, inverse: TensorType) -> None:
    """Raises TypeRuleError unless `inverse` has the type of x's inverse scales: f32, one number per feature."""
    if not x.floating or inverse.dtype != "f32":
        raise TypeRuleError(f"needs floats and f32 scales, not {x} and {inverse}", (0, 1))
    if inverse.shape != (x.width,):
        raise TypeRuleError(f"takes {inverse.shape[0]} features but {{input}} gives {x.width}", (0, 1))


@record
class QuantizeRows(Op):
    """Quantizes x [..., K] to i8 codes [..., columns]: x * inverse, rounded and clamped to [-127, 127].

    `inverse` is f32 [K]. Ties round to even, NaN becomes 0, and columns after K are 0. 16-bit inputs have two codes per
    value. With `second`, the output is the second code, which represents the remainder of the first (see `two_codes`).
    """

    name: ClassVar[str] = "quantize_rows"
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 2
    columns: int
    second: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, inverse = inputs
        check_scales(x, inverse)
        if not isinstance(x.width, int) or x.width > self.columns:
            raise TypeRuleError(f"cannot pad {x.width} columns to {self.columns}", (0,))
        return (TensorType((*rows(x), self.columns), "i8"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        pads = inputs[0].width != self.columns
        function = "quantize_rows" + ("_second" if self.second else "_padded" if pads else "")
        return TorchCall(function, (Input(0), Input(1), *((self.columns,) if self.second or pads else ())))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x, inverse = inputs
        codes = two_codes(x.float() * inverse)[self.second]
        return torch.cat((codes, codes.new_zeros(*codes.shape[:-1], self.columns - codes.shape[-1])), -1)


class Int8Product(Op):
    """The base class of ops that multiply by stored i8 codes w [N, K].

    `stored` is the index of the codes among the inputs. The plan selects a kernel for such an op inside and outside of
    fused groups.
    """

    matrix: ClassVar[bool] = True
    planned: ClassVar[bool] = True
    everywhere: ClassVar[bool] = True
    assigned: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    stored: ClassVar[int]

    def extent(self, weight: TensorType) -> tuple[int, int]:
        n, k = weight.shape
        assert isinstance(n, int) and isinstance(k, int)
        return n, k


class Int8Linear(Int8Product):
    """Multiplies i8 codes x [..., K] with stored i8 codes w [N, K], and adds offset i32 [N]. The sums i32 [..., N] are
    exact.

    All later operations, such as scaling, form the epilogue. If the output is i8, the epilogue rounds it to codes.
    """

    name: ClassVar[str] = "int8_linear"
    stored: ClassVar[int] = 1
    layout: ClassVar[Literal["nk"]] = "nk"
    arity: ClassVar[int] = 3
    words: ClassVar[str] = "int8 linear"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        n, k = inputs[1].shape
        return self.name, f"n{n}_k{k}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, weight, offset = inputs
        dtypes = f"{x.dtype}, {weight.dtype} and {offset.dtype}"
        if (x.dtype, weight.dtype, offset.dtype) != ("i8", "i8", "i32"):
            raise TypeRuleError(f"multiplies i8 by i8 and adds i32, not {dtypes}", (0, 1, 2))
        if len(weight.shape) != 2:
            raise TypeRuleError(f"takes a matrix [N, K], not {weight}", (1,))
        n, k = self.extent(weight)
        if x.width != k:
            raise TypeRuleError(
                f"has a weight of {k} columns, but its input has {x.width} features ({{input}})", (0, 1)
            )
        if k > LARGEST_K:
            raise TypeRuleError(f"sums at most {LARGEST_K:,} products in int32, but its weight has {k:,} columns", (1,))
        if offset.shape != (n,):
            raise TypeRuleError(f"has a weight of {n} rows, but the bias is {offset}", (2,))
        if n % ALIGNMENT or k % ALIGNMENT:
            raise TypeRuleError(f"takes weights whose sizes are multiples of {ALIGNMENT}, not [{n}, {k}]", (1,))
        return (TensorType((*rows(x), n), "i32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, weight = inputs[0], inputs[1]
        return 2 * x.with_shape(*rows(x)).count(sizes) * weight.count(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x, weight, offset = (tensor.to(torch.int64) for tensor in inputs)
        sums = x.new_zeros(*x.shape[:-1], weight.shape[0])
        for k in range(weight.shape[1]):
            sums += x[..., k : k + 1] * weight[:, k]
        return (sums + offset).to(torch.int32)
