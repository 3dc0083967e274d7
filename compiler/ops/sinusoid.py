"""Sinusoidal position encoding (Vaswani et al., 2017)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Input, Op, Sizes, TensorType, Traced

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sinusoid(Op):
    """Encodes positions i64[T] as [T, dim] in `dtype`: the sines, then the cosines, of position * 10000^(-2i/dim)."""

    name: ClassVar[str] = "sinusoid"
    inline: ClassVar[bool] = False
    dim: int
    dtype: str = "f32"

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((inputs[0].shape[0], self.dim), self.dtype),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 3 * outputs[0].count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        cast = {"f32": "", "bf16": ".bfloat16()", "f16": ".half()"}[self.dtype]
        return f"sinusoid({args[0]}, {self.dim}){cast}"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "sinusoid"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        waves = Traced("sinusoid", (Input(0), self.dim))
        cast = {"f32": "", "bf16": "bfloat16", "f16": "half"}[self.dtype]
        return Traced(cast, (waves,)) if cast else waves

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=inputs[0].device) / self.dim
        angle = inputs[0].double()[:, None] * 10000.0**-steps
        return torch.cat((angle.sin(), angle.cos()), -1)
