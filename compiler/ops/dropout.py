"""Dropout (Srivastava et al., 2014)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType


@dataclass(frozen=True, slots=True)
class Dropout(Op):
    """Sets each element of x to 0 with probability `p` and divides the others by 1 - p. Only training programs have it.

    Random numbers are drawn from Torch's generator of the device in program order, in the reference too.
    """

    name: ClassVar[str] = "dropout"
    inline: ClassVar[bool] = False  # random numbers must be drawn in program order
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 1
    p: float

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("F.dropout", (Input(0), self.p))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x = inputs[0]
        mask = torch.empty_like(x).bernoulli_(1 - self.p)
        return x * mask / (1 - self.p)
