"""Linear layers whose matrix products multiply 8-bit floats."""

from collections.abc import Sequence
from typing import Any, ClassVar

from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.linear import Linear, MatrixProduct, rows
from specc.compiler.records import record

STORAGE = "fp8"  # the storage format that marks the buffer of a layer with delayed scaling
FACTORS = ("x", "weight", "dy")  # the factors of a layer's three products, in the order of the buffer's columns
MOST = (448.0, 448.0, 57344.0)  # the largest values of e4m3, e4m3 and e5m2
USUAL = (16.0, 4.0, 1.0)  # the assumed magnitudes before the first step
SCALES, LARGEST, HISTORY = 0, 1, 2  # rows of a buffer; the magnitudes of the last steps begin at row HISTORY


def check_state(type: TensorType, index: int) -> None:
    """Raises TypeRuleError if `type`, the type of input `index`, is not the type of the state of `Fp8Linear`."""
    if (type.width, type.dtype, type.storage) != (len(FACTORS), "f32", STORAGE):
        raise TypeRuleError(f"reads scales f32 [2 + H, {len(FACTORS)}], not {type}", (index,))


@record
class Fp8Linear(MatrixProduct):
    """Computes y = x w^T for x [..., K] and w [N, K]. The factors of the products are rounded to 8 bits.

    Inputs and weights are rounded to e4m3, and output gradients to e5m2. Before rounding, each tensor is divided by a
    scale. The scale maps the largest magnitude to the largest number of the format. A delayed scale is rounded up to a
    power of two. The three products are y, dx = dy w and dw = dy^T x. Each product is summed in f32, and multiplied by
    the scales of its factors.

    Attributes:
        by_rows: Whether a factor has one scale for each vector along the summed dim. Otherwise, the whole factor has
            one scale.
        delayed: Whether a third input f32 [2 + H, 3] contains the scales, in columns for x, w and dy. The first row
            holds the scales. The second row holds the largest magnitudes since the scales were set. The products update
            this row. The last H rows hold the largest magnitudes of the last H steps.
    """

    name: ClassVar[str] = "fp8_linear"
    speed: ClassVar[int] = 2
    inline: ClassVar[bool] = False
    by_rows: bool = False
    delayed: bool = False

    @property
    def arity(self) -> int:
        return 3 if self.delayed else 2

    @property
    def words(self) -> str:
        scales = "a scale per row" if self.by_rows else "a scale per tensor"
        return f"fp8 linear, {scales}, {'delayed' if self.delayed else 'current'}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        outputs = Linear().infer(inputs[:2])
        if self.delayed:
            check_state(inputs[2], 2)
        return outputs

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, weight = inputs[:2]
        return 2 * x.with_shape(*rows(x)).count(sizes) * weight.count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        words = (("by_rows", True),) if self.by_rows else ()
        return TorchCall("fp8_linear", tuple(map(Input, range(self.arity))), words)

    def reference(self, *inputs: Tensor) -> Tensors:
        x, weight, *state = inputs
        y: Tensor = _rounded_products()(x, weight, state[0] if state else None, self.by_rows)
        return y


def delayed_scale(largest: Tensor, most: Tensor | float) -> Tensor:
    """Returns the smallest f32 power of two that is at least `largest` / `most`, or 1 where this quotient is 0. A
    magnitude of at most `largest` f32, divided by this scale, is at most `most`.

    Division by a power of two and multiplication by the reciprocal are both exact. The epilogue of a kernel can
    therefore multiply. With other scales, exact divisions would take most of the time of such a kernel.
    """
    import torch

    ratio = largest / most
    # the next exponent, unless all fraction bits are 0
    up = ((ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(ratio > 0, up, 1.0)


def begin_scales(state: Tensor) -> None:
    """Fills the state f32 [2 + H, 3] of a layer with scales for usual magnitudes. Training starts from these scales."""
    values = state.data.zero_()
    values[HISTORY:] = values.new_tensor(USUAL)
    values[SCALES] = delayed_scale(values[HISTORY], values.new_tensor(MOST))


def _rounded_products() -> Any:
    """Returns the `apply` of an autograd function with the three products. This function rounds the factors to 8 bits,
    and multiplies in the precision of the inputs."""
    import torch

    def near(value: Tensor, factor: int, state: Tensor | None, dim: int | None) -> Tensor:
        if state is not None:
            scale = state[0, factor].to(value.dtype)
        else:
            largest = value.abs().amax() if dim is None else value.abs().amax(dim, keepdim=True)
            scale = torch.where(largest > 0, largest / MOST[factor], 1.0)
        inside = (value / scale).clamp(-MOST[factor], MOST[factor])
        nearest: Tensor = inside.to(torch.float8_e5m2 if factor == 2 else torch.float8_e4m3fn).to(value.dtype) * scale
        return nearest

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, by_rows: bool) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.state, ctx.by_rows = state, by_rows
            along = -1 if by_rows else None
            products = near(x.flatten(0, -2), 0, state, along) @ near(weight, 1, state, along).T
            return products.view(*x.shape[:-1], len(weight))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
            x, weight = ctx.saved_tensors
            dy, state = grads[0].flatten(0, -2), ctx.state
            last, first = (1, 0) if ctx.by_rows else (None, None)
            dx = near(dy, 2, state, last) @ near(weight, 1, state, first)
            dw = near(dy, 2, state, first).T @ near(x.flatten(0, -2), 0, state, first)
            return dx.view_as(x), dw, None, None

    return Products.apply
