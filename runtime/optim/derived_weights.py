"""Derived weights: matrices that the model computes only from parameters. They are computed once per step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.programs.programs import DerivedWeight
from specc.runtime.dtypes import DTYPES


class DerivedWeights:
    """The derived weights of a model, as leaf tensors of autograd.

    Backward passes accumulate gradients in the leaves. Once per step, `add_gradients` applies the chain rule to the
    accumulated gradients, and thus computes the gradients of the parameters. Accumulation before the chain rule is
    exact, because the chain rule is linear in the gradient.

    Args:
        model: the model, on its final device.
        weights: the derived weights of the model.

    Attributes:
        leaves: the derived matrices, in their compute dtypes.
    """

    def __init__(self, model: nn.Module, weights: Sequence[DerivedWeight]) -> None:
        self._weights = [(weight, _Matrix(model.get_submodule(weight.at), weight.method)) for weight in weights]
        device = next(model.parameters()).device
        self.leaves = [
            torch.empty(weight.shape, dtype=DTYPES[weight.dtype], device=device, requires_grad=True)
            for weight in weights
        ]
        for (_, matrix), leaf in zip(self._weights, self.leaves, strict=True):
            matrix.hold(leaf)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Computes the derived matrices, and writes them to `leaves`. `values` contains the parameters, by name.

        Each matrix is computed in f32 and rounded once. Only one f32 matrix exists at a time, to save memory.
        """
        for (weight, matrix), leaf in zip(self._weights, self.leaves, strict=True):
            leaf.copy_(matrix.of(_values(weight, values)))

    def add_gradients(
        self, totals: Sequence[Tensor], values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Adds the gradients that reach the parameters through the derived weights.

        Args:
            totals: the accumulated gradient of each matrix, f32, in the order of `leaves`.
            values: the mapping that was passed to the last call of `write`.
            gradients: the gradients of the parameters, f32, by name. The method updates them in place.
        """
        for (weight, matrix), total in zip(self._weights, totals, strict=True):
            with torch.enable_grad():
                learned = {name: value.detach().requires_grad_() for name, value in _values(weight, values).items()}
                parts = torch.autograd.grad(matrix.of(learned), list(learned.values()), total)
            for name, part in zip(weight.params, parts, strict=True):
                gradients[name].add_(part)


class _Matrix(nn.Module):
    """Computes one derived weight of one block from the parameters of the model."""

    def __init__(self, block: nn.Module, method: str) -> None:
        super().__init__()
        self.block, self._method = block, method

    def forward(self) -> Tensor:
        value: Tensor = getattr(type(self.block), self._method).__wrapped__(self.block)
        return value

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        value: Tensor = torch.func.functional_call(self, {f"block.{name}": value for name, value in values.items()})
        return value

    def hold(self, leaf: Tensor) -> None:
        setattr(self.block, f"derived_{self._method}", leaf)


def _values(weight: DerivedWeight, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{weight.at}."): values[name].detach().float() for name in weight.params}
