"""The load of an expert: the fraction of the tokens that a layer routes to the expert."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = "::grouped_products"  # the op of templates/torch/ops/grouped_linear.py.jinja


class _Loads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the rows (tokens) of each expert in grouped matrix products.

    Attributes:
        rows: the number of rows of each expert, f64 [experts], by the name of the parameter with the expert matrices.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        self.rows: dict[str, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.name().endswith(PRODUCTS):
            _, weight, ends = args
            name = self._names[weight.data_ptr()]
            rows = ends.diff(prepend=ends.new_zeros(1)).double()
            self.rows[name] = self.rows[name] + rows if name in self.rows else rows
        return func(*args, **(kwargs or {}))


def expert_loads(
    model: nn.Module, score: Callable[[Tensor, Tensor], Tensor], ids: Tensor, targets: Tensor
) -> dict[str, list[float]]:
    """Returns the fraction of rows that each expert of each layer receives. The fractions of a layer sum to 1.

    Args:
        model: the model.
        score: the program of `model` to run. It must not be compiled.
        ids: the tokens, i64 [B, T].
        targets: the targets, i64 [B, T].

    Returns:
        The fractions of each layer, by the path of the layer, such as `blocks.1.moe`. The result is empty if the model
        has no experts.
    """
    loads: dict[str, list[float]] = {}
    with torch.no_grad(), _Loads(model) as counted:
        score(ids, targets)
    for name, rows in counted.rows.items():  # all matrix products of a layer have the same rows
        loads.setdefault(name.rpartition(".")[0], (rows / rows.sum()).tolist())
    return loads


def imbalance(loads: Mapping[str, Sequence[float]]) -> float:
    """Returns the largest ratio, over all layers, of the load of an expert to the mean load of its layer.

    The result is 1 if all loads are equal. `loads` contains the loads of each layer, by the path of the layer.
    """
    return max(len(load) * max(load) for load in loads.values())
