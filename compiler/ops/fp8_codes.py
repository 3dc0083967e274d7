"""The parts of `Fp8Linear` with delayed scaling: the rounding of an operand to codes, and the three products of codes.

The ops are separate, so that a kernel of a fused group can compute an operand and also write the operand's codes.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from specc.compiler.ir.op import Gradients, Op, SupportCall, Tape
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import DTYPES, Sizes, Tensor, Tensors, TensorType
from specc.compiler.ops.fp8 import MOST, SCALES, check_state
from specc.compiler.ops.linear import Linear, MatrixProduct, Product, Wgrad, rows
from specc.compiler.records import record

FORMATS = ("e4m3", "e4m3", "e5m2")  # the dtypes of the codes of x, of the weight and of dy
Role = Literal["y", "dx", "dw"]


def codes_of(value: Tensor, state: Tensor, factor: int) -> Tensor:
    """Converts `value`, an operand of a matrix product, to 8-bit codes. The function divides `value` by its scale in
    `state`, clamps the quotient to the range of an 8-bit format, and rounds the quotient to this format. `factor`
    selects the scale and the format: 0 for x, 1 for the weight, 2 for dy. The result has the dtype of `value`. This
    dtype represents the rounded numbers exactly."""
    import torch

    scaled = (value / state[SCALES, factor].to(value)).clamp(-MOST[factor], MOST[factor])
    dtype: torch.dtype = getattr(torch, DTYPES[FORMATS[factor]].removeprefix("torch."))
    return scaled.to(dtype).to(value)


@record
class Fp8Codes(SupportCall):
    """Converts an operand of a matrix product to 8-bit codes: divides the operand by its scale, clamps the quotient to
    the range of an 8-bit format, and rounds the quotient.

    The inputs are the operand and the state of `Fp8Linear`, f32 [2 + H, 3]. Generated code also records the largest
    magnitude of the operand in the state. Gradients ignore the rounding: the gradient of the operand is the gradient of
    codes * scale.

    Attributes:
        factor: The operand: 0 for x, 1 for the weight, 2 for the gradient of y.
    """

    name: ClassVar[str] = "fp8_codes"
    arity: ClassVar[int] = 2
    inline: ClassVar[bool] = False  # the op changes the state, so it needs a separate line
    joined_when: ClassVar[str] = (
        "a kernel rounds a value to 8 bits only if it computes the value as a product with an epilogue"
    )
    factor: int

    @property
    def words(self) -> str:
        return f"rounding to {FORMATS[self.factor]}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        check_state(inputs[1], 1)
        return (TensorType(inputs[0].shape, FORMATS[self.factor]),)

    def reference(self, *inputs: Tensor) -> Tensors:
        value, state = inputs
        return codes_of(value, state, self.factor)

    def derivative(self, tape: Tape) -> Gradients | None:
        return tape.grad(), None


@record
class Transposed(Op):
    """Stores the transpose of a matrix."""

    name: ClassVar[str] = "transposed"
    arity: ClassVar[int] = 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        first, second = inputs[0].shape
        return (inputs[0].with_shape(second, first),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".contiguous", (TorchCall(".", (Input(0), "T")),))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].T


@record
class CodesLinear(Product):
    """Computes y = x w^T for codes x [..., K] and w [N, K], without scales. The epilogue of the kernel applies the
    scales."""

    name: ClassVar[str] = "fp8"
    layout: ClassVar[Literal["nk", "kn"]] = "nk"
    arity: ClassVar[int] = 2
    speed: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType(Linear().infer(inputs)[0].shape, "f32"),)

    def product_text(self, rows: str, weight: str) -> str:
        return f"{rows}.float() @ {weight}.float().T"

    def reference(self, *inputs: Tensor) -> Tensors:
        x, w = (value.float() if value.dtype.itemsize == 1 else value for value in inputs)
        return x @ w.T


ROLES: dict[Role, tuple[Op, tuple[int, int]]] = {
    "y": (Linear(), (0, 1)),
    "dx": (Linear(), (2, 1)),
    "dw": (Wgrad(), (2, 0)),
}


@record
class Fp8Product(MatrixProduct):
    """One of the three products of a linear layer: y = x w^T, dx = dy w, or dw = dy^T x. The op multiplies codes in
    f32, and multiplies the product by the scales of both operands.

    The inputs are the codes of two operands and the state with the scales. For dx, the second input is the transposed
    weight, because tensor cores require 8-bit operands that are contiguous along the summed dim.

    Attributes:
        role: Which of the three products the op computes.
        dtype: The dtype of the result.
        weight_dtype: The dtype of the gradient of the weight.
    """

    name: ClassVar[str] = "fp8_product"
    arity: ClassVar[int] = 3
    speed: ClassVar[int] = 2
    inline: ClassVar[bool] = False
    role: Role
    dtype: str
    weight_dtype: str = ""

    @property
    def words(self) -> str:
        return f"fp8 product, {self.role}, a scale per tensor, delayed"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        check_state(inputs[2], 2)
        (product,) = ROLES[self.role][0].infer(inputs[:2])
        return (TensorType(product.shape, self.dtype),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        a, b = inputs[:2]
        wide = b.width if self.role == "dw" else 1
        assert isinstance(wide, int)
        other = wide if self.role == "dw" else b.count(sizes)
        return 2 * (a.count(sizes) if self.role == "dw" else a.with_shape(*rows(a)).count(sizes)) * other

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("fp8_product", (Input(0), Input(1), Input(2), self.role, self.dtype))

    def reference(self, *inputs: Tensor) -> Tensors:
        a, b, state = inputs
        op, factors = ROLES[self.role]
        product = op.reference(a, b)
        assert not isinstance(product, tuple)
        scale = state[SCALES, factors[0]] * state[SCALES, factors[1]]
        value: Tensor = product * scale.to(product)
        return value

    def derivative(self, tape: Tape) -> Gradients | None:
        if self.role != "y":
            return None
        x, weight, state = map(tape.input, range(3))
        dy = tape.add("dcodes", Fp8Codes(2), (tape.grad(), state))
        across = tape.add("across", Transposed(), (weight,))
        dx = tape.add("dgrad", Fp8Product("dx", self.dtype), (dy, across, state))
        return dx, tape.add("wgrad", Fp8Product("dw", self.weight_dtype or self.dtype), (dy, x, state)), None
