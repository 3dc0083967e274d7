"""What a program is scored by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from specc.compiler.ir import Input, Op, Sizes, TensorType, Traced, TypeRuleError, operand

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossEntropy(Op):
    """-log softmax(logits)[target] in nats for logits f32[B, T, V] and targets i64[B, T]: the mean, or one a token."""

    name: ClassVar[str] = "cross_entropy"
    reduction: Literal["mean", "none"]

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        logits, targets = inputs
        if logits.shape[:-1] != targets.shape:
            raise TypeRuleError(f"scores {logits} by targets {targets}", (0, 1))
        return (TensorType(targets.shape if self.reduction == "none" else (), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 4 * inputs[0].count(sizes)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        logits, targets = map(operand, args)
        if self.reduction == "mean":
            return f"F.cross_entropy({logits}.flatten(0, 1), {targets}.flatten())"
        return f'F.cross_entropy({logits}.transpose(1, 2), {targets}, reduction="none")'

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        if self.reduction == "mean":
            return Traced("cross_entropy", (Traced("flatten", (Input(0), 0, 1)), Traced("flatten", (Input(1),))))
        transposed = Traced("transpose", (Input(0), 1, 2))
        return Traced("cross_entropy", (transposed, Input(1)), (("reduction", "none"),))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        logits, targets = inputs
        nats = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return nats.mean() if self.reduction == "mean" else nats
