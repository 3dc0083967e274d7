"""The router of a mixture of experts, which scores all experts, chooses the best experts, and computes their
weights."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Op, SupportCall
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record


@record
class Softmax(Op):
    """exp(x) / sum(exp(x)) over the last dim."""

    name: ClassVar[str] = "softmax"
    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".softmax", (Input(0), -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        powers = (inputs[0] - inputs[0].amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True)


@record
class LogSumExp(Op):
    """log(sum(exp(x))) over the last dim of x [..., N]. The result is [...]."""

    name: ClassVar[str] = "logsumexp"
    arity: ClassVar[int] = 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0].with_shape(*inputs[0].shape[:-1]),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".logsumexp", (Input(0), -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        largest = inputs[0].amax(-1)
        return largest + (inputs[0] - largest.unsqueeze(-1)).exp().sum(-1).log()


@record
class TopExperts(Op):
    """The indices i64[..., `count`] of the largest scores f32[..., E], in descending order.

    With `biased`, a second input f32[E] is added to the scores before the choice. There is no gradient.
    """

    name: ClassVar[str] = "top_experts"
    flops_per_output: ClassVar[int] = 0
    count: int
    biased: bool = False

    @property
    def arity(self) -> int:
        return 1 + self.biased

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        scores, *bias = inputs
        if not isinstance(scores.width, int) or self.count > scores.width:
            raise TypeRuleError(f"cannot choose {self.count} of {scores.width} experts", (0,))
        if any(type.shape != (scores.width,) for type in bias):
            raise TypeRuleError(f"needs a bias for {scores.width} experts, not for {bias[0]}", (1,))
        return (TensorType((*scores.shape[:-1], self.count), "i64"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        scores = TorchCall("+", (Input(0), Input(1))) if self.biased else Input(0)
        return TorchCall("top_experts", (scores, self.count))

    def reference(self, *inputs: Tensor) -> Tensors:
        scores = inputs[0] + inputs[1] if self.biased else inputs[0]
        return scores.detach().sort(-1, descending=True).indices[..., : self.count]


@record
class BestGroups(SupportCall):
    """The scores f32[..., E], with -inf for all experts outside of the best groups (DeepSeek-V3).

    Consecutive experts form `groups` groups. The score of a group is the sum of the `best` largest scores in the group.
    The `top` groups with the largest scores are the best.
    """

    name: ClassVar[str] = "best_groups"
    arity: ClassVar[int] = 1
    groups: int
    top: int
    best: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        width = inputs[0].width
        if not isinstance(width, int) or width % self.groups or self.best > width // self.groups:
            raise TypeRuleError(f"cannot split {width} experts into {self.groups} groups of {self.best} or more", (0,))
        return (inputs[0],)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        scores = inputs[0].reshape(*inputs[0].shape[:-1], self.groups, -1)
        worth = scores.sort(-1, descending=True).values[..., : self.best].sum(-1)
        least = worth.sort(-1, descending=True).values[..., self.top - 1 : self.top]
        return torch.where((worth >= least).unsqueeze(-1), scores, -torch.inf).flatten(-2)


@record
class ScoresOf(Moves):
    """Selects the scores f32[..., K] of the chosen experts i64[..., K] from the scores f32[..., E] of all experts."""

    name: ClassVar[str] = "scores_of"
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        scores, experts = inputs
        if scores.shape[:-1] != experts.shape[:-1]:
            raise TypeRuleError(f"needs scores of the same tokens as the experts {experts}, not {scores}", (0, 1))
        return (scores.with_shape(*experts.shape),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".gather", (Input(0), -1, Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.take_along_dim(inputs[0], inputs[1], dim=-1)


@record
class ShareOfSum(Op):
    """x / sum(x) over the last dim. x must not be negative, and its sum must be positive."""

    name: ClassVar[str] = "share_of_sum"
    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("/", (Input(0), TorchCall(".sum", (Input(0), -1), (("keepdim", True),))))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.einsum("...e,...->...e", inputs[0], 1 / torch.einsum("...e->...", inputs[0]))
