"""Rotary position embedding (Su et al., 2021) of the first channels of each head, paired in halves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Input, Op, Sizes, TensorType, Traced, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions(Op):
    """The positions i64[T] of the tokens of ids [B, T]: 0, 1, ..., plus the optional second input `start` (i64[])."""

    name: ClassVar[str] = "positions"
    inline: ClassVar[bool] = False

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((inputs[0].shape[1],), "i64"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        counted = f"torch.arange({args[0]}.shape[1], device={args[0]}.device)"
        return counted if len(args) == 1 else f"{args[1]} + {counted}"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        counted = Traced("arange", (Traced("getitem", (Traced("getattr", (Input(0), "shape")), 1)),))
        return counted if len(inputs) == 1 else Traced("add", (Input(1), counted))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        counted = torch.arange(inputs[0].shape[1], device=inputs[0].device)
        return counted if len(inputs) == 1 else inputs[1] + counted


@dataclass(frozen=True, slots=True)
class RopeAngles(Op):
    """Returns cos and sin, f32[T, dims/2], of the angles position * base^(-2i/dims)."""

    name: ClassVar[str] = "rope_angles"
    inline: ClassVar[bool] = False
    dims: int
    base: float

    @property
    def arity(self) -> int:
        return 1

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "cos", "sin"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        angle = TensorType((inputs[0].shape[0], self.dims // 2), "f32")
        return angle, angle

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 3 * outputs[0].count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"rope_angles({args[0]}, {self.dims}, {self.base})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "rope_angles"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("rope_angles", (Input(0), self.dims, self.base))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        steps = torch.arange(0, self.dims, 2, dtype=torch.float64, device=inputs[0].device) / self.dims
        angle = torch.outer(inputs[0].double(), self.base**-steps)
        return angle.cos(), angle.sin()


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotates the first 2R of C channels of x [B, T, H, C] by the angles [T, R].

    Channel i is paired with channel R + i.
    """

    name: ClassVar[str] = "rope"
    keeps_features: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, cos, _ = inputs
        assert isinstance(x.width, int) and isinstance(cos.width, int)
        if 2 * cos.width > x.width:
            raise TypeRuleError(f"rotates {2 * cos.width} dims of heads of {x.width}", (0, 1))
        return (x,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, cos, _ = inputs
        assert isinstance(x.width, int) and isinstance(cos.width, int)
        return 3 * x.with_shape(*x.shape[:-1], 2 * cos.width).count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{self.support(inputs)}({', '.join(args)})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        x, cos, _ = inputs
        assert isinstance(cos.width, int)
        return "rope" if 2 * cos.width == x.width else "rope_partial"

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        x, cos, sin = inputs
        half = cos.shape[-1]
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, -sin)[:, None]
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1).to(x.dtype)  # angles may be wider than x
