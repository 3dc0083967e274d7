"""Positions of tokens: rotary embedding (Su et al., 2021) of the first channels of each head, and sinusoids."""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import ClassVar

from specc.compiler.ir.op import ADDED, Op, SupportCall
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.pointwise import CASTS
from specc.compiler.records import record


class Positions(Op):
    """The positions i64[T] of the tokens in ids [B, T]. The positions are consecutive numbers. The first position is 0,
    or the optional second input, i64[].
    """

    name: ClassVar[str] = "positions"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((inputs[0].shape[1],), "i64"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        if len(inputs) == 2 and inputs[0].shape[1] == 1:
            return TorchCall(".reshape", (Input(1), 1))  # a view, without a kernel
        length = TorchCall("[]", (TorchCall(".", (Input(0), "shape")), 1))
        counted = TorchCall("torch.arange", (length,), (("device", TorchCall(".", (Input(0), "device"))),))
        return counted if len(inputs) == 1 else TorchCall("+", (Input(1), counted))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        counted = torch.arange(inputs[0].shape[1], device=inputs[0].device)
        return counted if len(inputs) == 1 else inputs[1] + counted


@record
class RopeAngles(SupportCall):
    """Returns cos and sin, f32[T, dims/2], of the angles position * base^(-2i/dims)."""

    name: ClassVar[str] = "rope_angles"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 1
    output_labels: ClassVar[tuple[str, ...]] = ("cos", "sin")
    flops_per_output: ClassVar[int] = 3
    dims: int
    base: float

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        angle = TensorType((inputs[0].shape[0], self.dims // 2), "f32")
        return angle, angle

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        steps = torch.arange(0, self.dims, 2, dtype=torch.float64, device=inputs[0].device) / self.dims
        angle = torch.outer(inputs[0].double(), self.base**-steps)
        return angle.cos(), angle.sin()


@record
class RopeRows(SupportCall):
    """Returns cos and sin, f32[T, dims/2], of the angles position * base^(-2i/dims). The op reads the rows of a table
    that is computed once for all positions below `context`."""

    name: ClassVar[str] = "rope_rows"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 1
    output_labels: ClassVar[tuple[str, ...]] = ("cos", "sin")
    flops_per_output: ClassVar[int] = 0
    dims: int
    base: float
    context: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return RopeAngles(self.dims, self.base).infer(inputs)

    def reference(self, *inputs: Tensor) -> Tensors:
        return RopeAngles(self.dims, self.base).reference(*inputs)


@record
class RotaryPairs(Op):
    """The indices 0, 1, ... of `count` pairs of channels, i64[count], on the device of the input."""

    name: ClassVar[str] = "rotary_pairs"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 0
    count: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((self.count,), "i64"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("torch.arange", (self.count,), (("device", TorchCall(".", (Input(0), "device"))),))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.tensor(range(self.count), device=inputs[0].device)


@record
class RotaryFrequencies(Op):
    """Computes the frequencies 1 / base^(i/R), f32[R], in radians per token. The input i64[R] holds the indices i."""

    name: ClassVar[str] = "rotary_frequencies"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 3
    base: float

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, "f32"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        share = TorchCall("/", (Input(0), inputs[0].width))
        return TorchCall("/", (1.0, TorchCall("**", (self.base, share))))

    def reference(self, *inputs: Tensor) -> Tensors:
        return self.base ** -(inputs[0].double() / inputs[0].shape[0])


@record
class RotaryAngles(Op):
    """Returns cos and sin, f32[T, R], of the products of positions i64[T] and frequencies f32[R]. cos and sin are then
    multiplied by `magnitude`."""

    name: ClassVar[str] = "rotary_angles"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 2
    output_labels: ClassVar[tuple[str, ...]] = ("cos", "sin")
    flops_per_output: ClassVar[int] = 3
    magnitude: float = 1.0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        angle = TensorType((inputs[0].shape[0], inputs[1].width), "f32")
        return angle, angle

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        factor = () if self.magnitude == 1 else (self.magnitude,)
        return TorchCall("rotary_angles", (Input(0), Input(1), *factor))

    def reference(self, *inputs: Tensor) -> Tensors:
        positions, frequencies = (value.double() for value in inputs)
        angle = positions[:, None] * frequencies
        return self.magnitude * angle.cos(), self.magnitude * angle.sin()


@record
class Rope(Op):
    """Rotates the first 2R of C channels of x [B, T, H, C] by the angles [T, R].

    Channel i is paired with channel R + i. With `neighbors`, channel 2i is instead paired with channel 2i + 1. If
    `scales` is true, cos and sin contain a magnitude, so the rotation also changes the length of a pair.
    """

    name: ClassVar[str] = "rope"
    linear_in: ClassVar[int] = 1
    always_stored: ClassVar[bool] = True
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 3
    neighbors: bool = False
    scales: bool = field(default=False, metadata=ADDED)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, cos, _ = inputs
        assert isinstance(x.width, int) and isinstance(cos.width, int)
        if 2 * cos.width > x.width:
            raise TypeRuleError(f"cannot rotate {2 * cos.width} channels: a head has {x.width}", (0, 1))
        return (x,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return rotation_flops(inputs[0], inputs[1], sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        x, cos, _ = inputs
        assert isinstance(cos.width, int)
        function = "rope" if 2 * cos.width == x.width else "rope_partial"
        return TorchCall("rope_neighbors" if self.neighbors else function, (Input(0), Input(1), Input(2)))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x, cos, sin = inputs
        turned = rotated(x, torch.complex(cos, -sin)[:, None], self.neighbors)
        # The dtype of the angles may be wider than the dtype of x
        return torch.cat((turned, x[..., 2 * cos.shape[-1] :]), -1).to(x.dtype)


def rotation_flops(x: TensorType, cos: TensorType, sizes: Sizes) -> int:
    """Counts the operations that rotate the channels of x, two channels per angle."""
    assert isinstance(cos.width, int)
    return 3 * x.with_shape(*x.shape[:-1], 2 * cos.width).count(sizes)


def rotated(x: Tensor, by: Tensor, neighbors: bool) -> Tensor:
    """Returns the first 2R of C channels of x [..., C], rotated by the complex numbers `by` [..., R].

    The dtype of the result is at least f32, because Torch has no complex numbers of bf16.
    """
    import torch

    x = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = by.shape[-1]
    first = slice(0, 2 * pairs, 2) if neighbors else slice(pairs)
    second = slice(1, 2 * pairs, 2) if neighbors else slice(pairs, 2 * pairs)
    turned = torch.complex(x[..., first], x[..., second]) * by
    return torch.view_as_real(turned).flatten(-2) if neighbors else torch.cat((turned.real, turned.imag), -1)


@record
class Sinusoid(Op):
    """Sinusoidal encoding of positions i64[T] as [T, dim] in `dtype` (Vaswani et al., 2017).

    The features are the sines, then the cosines, of position * 10000^(-2i/dim).
    """

    name: ClassVar[str] = "sinusoid"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 3
    dim: int
    dtype: str = "f32"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((inputs[0].shape[0], self.dim), self.dtype),)

    def retyped(self, change: Callable[[TensorType], TensorType]) -> Op:
        return replace(self, dtype=change(TensorType((), self.dtype)).dtype)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        waves = TorchCall("sinusoid", (Input(0), int(self.dim)))
        return waves if self.dtype == "f32" else TorchCall(f".{CASTS[self.dtype]}", (waves,))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=inputs[0].device) / self.dim
        angle = inputs[0].double()[:, None] * 10000.0**-steps
        return torch.cat((angle.sin(), angle.cos()), -1)
