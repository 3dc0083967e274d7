"""Sorts tokens by expert, so that each expert multiplies consecutive rows. No token is dropped.

A token has K experts, so B T tokens have B T K rows. Sorted rows also have the dims [B, T, K], so no shape depends on
the values of a batch. The sorted row [b, t, k] may belong to another token than [b, t].
"""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import SupportCall
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.linear import MatrixProduct
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record

GROUPED_LINEAR = "grouped_linear"  # the name of the op, and of its function in generated code


@record
class SortByExpert(SupportCall, Moves):
    """Computes the order of rows sorted by expert, for expert indices i64[B, T, K] below `experts`.

    There are three outputs. `order` i64[B, T, K] is the original index of each sorted row. `place` i64[B, T, K] is the
    sorted index of each original row. `ends` i32[E] is the cumulative number of rows per expert. The rows of one
    expert are in token order.
    """

    name: ClassVar[str] = "sort_by_expert"
    inline: ClassVar[bool] = False
    output_labels: ClassVar[tuple[str, ...]] = ("order", "place", "ends")
    experts: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return inputs[0], inputs[0], TensorType((self.experts,), "i32")

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        experts = inputs[0].flatten().tolist()
        order = sorted(range(len(experts)), key=experts.__getitem__)
        place = [0] * len(order)
        for i, row in enumerate(order):
            place[row] = i
        ends = [sum(expert <= e for expert in experts) for e in range(self.experts)]
        rows = (torch.tensor(value, device=inputs[0].device).reshape(inputs[0].shape) for value in (order, place))
        return *rows, torch.tensor(ends, dtype=torch.int32, device=inputs[0].device)


@record
class Dispatch(SupportCall, Moves):
    """Copies each token of x [B, T, D] to its K rows, and sorts the rows by expert: [B, T, K, D]. The other inputs are
    `order` and `place` of SortByExpert."""

    name: ClassVar[str] = "dispatch"
    arity: ClassVar[int] = 3
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, order, place = inputs
        if order != place or order.shape[:-1] != x.shape[:-1]:
            raise TypeRuleError(
                f"needs inputs `order` and `place` of one type [B, T, K] for x {x}, not {order} and {place}", (0, 1, 2)
            )
        return (x.with_shape(*order.shape, x.width),)

    def reference(self, *inputs: Tensor) -> Tensors:
        x, order, _ = inputs
        tokens = x.flatten(0, -2)
        return tokens[order // order.shape[-1]]


@record
class OfExperts(Moves):
    """Selects the value of an expert for each sorted row, from values [E, N]. The result is [B, T, K, N].

    The other inputs are the tokens' experts i64[B, T, K], and `order` of SortByExpert.
    """

    name: ClassVar[str] = "of_experts"
    arity: ClassVar[int] = 3

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        values, experts, order = inputs
        if len(values.shape) != 2 or experts != order:
            message = f"needs values [E, N], and experts and an order of one type, not {values}, {experts} and {order}"
            raise TypeRuleError(message, (0, 2))
        return (values.with_shape(*order.shape, values.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("F.embedding", (TorchCall(".take", (Input(1), Input(2))), Input(0)))

    def reference(self, *inputs: Tensor) -> Tensors:
        values, experts, order = inputs
        return values[experts.flatten()[order]]


@record
class Combine(SupportCall):
    """Computes the weighted sum of each token's rows, y [B, T, D]. Inputs are the rows [B, T, K, D], sorted by expert,
    and weights f32[B, T, K].

    The other inputs are `order` and `place` of SortByExpert. The sum is computed in f32 or wider.
    """

    name: ClassVar[str] = "combine"
    arity: ClassVar[int] = 4
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        rows, weights, order, place = inputs
        if not rows.shape[:-1] == weights.shape == order.shape == place.shape:
            raise TypeRuleError(f"needs one weight per row of {rows}, not {weights}", (0, 1))
        return (rows.with_shape(*rows.shape[:-2], rows.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * inputs[0].count(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        rows, weights, order, _ = inputs
        weighted = rows.flatten(0, -2) * weights.flatten()[order.flatten()].unsqueeze(1)
        y = torch.zeros_like(rows.flatten(0, -2)[: weights[..., 0].numel()])
        tokens = order.flatten() // order.shape[-1]
        return y.index_add(0, tokens, weighted.to(y.dtype)).reshape(*weights.shape[:-1], -1)


@record
class GroupedLinear(SupportCall, MatrixProduct):
    """y = x w_e^T for the rows x [B, T, K, In] of each expert e, with weights w [E, Out, In].

    Rows are sorted by expert. `ends` i32[E] is the cumulative number of rows per expert.
    """

    name: ClassVar[str] = GROUPED_LINEAR
    unexportable: ClassVar[str] = (
        "a product per expert: its number of rows depends on the values of a batch, and an exported program may depend "
        "only on sizes"
    )
    arity: ClassVar[int] = 3

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        experts, n, k = inputs[1].shape
        return self.name, f"e{experts}_n{n}_k{k}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, weight, ends = inputs
        if len(weight.shape) != 3 or ends.shape != weight.shape[:1]:
            raise TypeRuleError(f"needs one matrix [N, K] per expert, not {weight} for experts {ends}", (1, 2))
        if weight.width != x.width:
            raise TypeRuleError(f"takes {weight.width} features but {{input}} gives {x.width}", (0, 1))
        return (x.with_shape(*x.shape[:-1], weight.shape[1]),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, weight, _ = inputs
        return 2 * x.count(sizes) * weight.with_shape(weight.shape[1]).count(sizes)

    def used_share(self, inputs: Sequence[TensorType]) -> float:
        (*_, chosen, _), (experts, *_) = (type.shape for type in inputs[:2])
        assert isinstance(chosen, int) and isinstance(experts, int)
        return chosen / experts

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x, weight, ends = inputs
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = torch.split(x.flatten(0, -2), counts)
        products = [rows @ matrix.T for rows, matrix in zip(parts, weight, strict=True)]
        return torch.cat(products).reshape(*x.shape[:-1], -1)
