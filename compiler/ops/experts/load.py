"""The load of experts, and two ways to balance the load: a loss, and a bias per expert with its own gradient rule."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Op, SupportCall
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.loss import attached
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record


@record
class ExpertLoad(SupportCall):
    """The load f32[B, E] of `experts` experts: the share of a sequence's rows that each expert receives.

    The input is the experts of each token, i64[B, T, K]. There is no gradient.
    """

    name: ClassVar[str] = "expert_load"
    arity: ClassVar[int] = 1
    experts: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType((inputs[0].shape[0], self.experts), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return inputs[0].count(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        rows = [[row.count(e) / len(row) for e in range(self.experts)] for row in inputs[0].flatten(1).tolist()]
        return torch.tensor(rows, dtype=torch.float64, device=inputs[0].device)


@record
class BalanceLoss(Op):
    """The balance loss E sum_e load_e p_e, f32[], where p_e is the mean probability of expert e. The loss is 1 if all
    loads are equal, or if all p_e are equal.

    Inputs are probabilities f32[B, T, E] and the load f32[B, E]. Means are over all tokens (Fedus et al. 2022, "Switch
    Transformers", equation 4). With `by_sequence`, the result is the mean of one loss per sequence. The means in such a
    loss are over the tokens of the sequence (DeepSeek-AI 2024, arXiv 2412.19437, equation 17).
    """

    name: ClassVar[str] = "balance_loss"
    arity: ClassVar[int] = 2
    by_sequence: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        probabilities, load = inputs
        if (probabilities.shape[0], probabilities.width) != load.shape:
            raise TypeRuleError(
                f"needs a load [B, E] that matches the probabilities {probabilities}, not {load}", (0, 1)
            )
        return (TensorType((), "f32"),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(f"{'sequence_' if self.by_sequence else ''}balance_loss", (Input(0), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        probabilities, load = inputs
        p = probabilities.flatten(1, -2).mean(1)
        if not self.by_sequence:
            p, load = p.mean(0, keepdim=True), load.mean(0, keepdim=True)
        return p.shape[-1] * (p * load.to(p.dtype)).sum() / len(p)


@record
class AttachLoad(SupportCall, Moves):
    """Returns the weights f32[B, T, K] unchanged. The backward pass gives the bias f32[E] a gradient: each expert's
    load minus the mean load.

    Inputs are the weights, the bias, and the load f32[B, E]. With this gradient, an optimizer lowers the bias of an
    expert that has more than the mean load. The bias balances the load without an auxiliary loss (Wang et al. 2024,
    arXiv 2408.15664).
    """

    name: ClassVar[str] = "attach_load"
    arity: ClassVar[int] = 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        weights, bias, load = inputs
        if bias.shape != load.shape[1:]:
            raise TypeRuleError(f"needs a load [B, E] that matches the bias {bias}, not {load}", (1, 2))
        return (weights,)

    def reference(self, *inputs: Tensor) -> Tensors:
        weights, bias, load = inputs

        def gradient() -> Tensor:
            mean = load.mean(0)
            return (mean - mean.mean()).to(bias.dtype)

        return attached(weights, bias, gradient)
