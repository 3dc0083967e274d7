"""Matrices that a model computes only from parameters. Their values and gradients are computed once per step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.programs.programs import DerivedWeight
from specc.runtime.dtypes import DTYPES


class DerivedWeights:
    """The derived weights of a model, as leaf tensors of autograd.

    A leaf replaces the method that computes the matrix, and backward passes accumulate the gradient of the leaf.
    `add_gradients` then applies the chain rule and adds the gradients of the parameters. Because this is linear in the
    gradient of the leaf, the result is the same as if every pass computed the matrix.

    Args:
        model: the model. It is already on the device on which it will run.
        weights: its derived weights.

    Attributes:
        leaves: the matrices, in the dtypes in which programs read them.
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
        """Computes the matrices in f32 from the values of parameters, by name, and rounds each once.

        Only one f32 matrix exists at a time, because all of them together may be larger than any other temporary value
        of an update.
        """
        for (weight, matrix), leaf in zip(self._weights, self.leaves, strict=True):
            leaf.copy_(matrix.of(_values(weight, values)))

    def add_gradients(
        self, totals: Sequence[Tensor], values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Completes the gradients of the parameters: adds the part that reaches them through the matrices.

        Args:
            totals: f32, the gradient of each matrix, in the order of `leaves`.
            values: the values of parameters, by name, with which `write` was last called.
            gradients: the gradients of parameters, f32, by name. The part is added to them.
        """
        for (weight, matrix), total in zip(self._weights, totals, strict=True):
            with torch.enable_grad():
                learned = {name: value.detach().requires_grad_() for name, value in _values(weight, values).items()}
                parts = torch.autograd.grad(matrix.of(learned), list(learned.values()), total)
            for name, part in zip(weight.params, parts, strict=True):
                gradients[name].add_(part)


class _Matrix(nn.Module):
    """A derived weight of a block. `functional_call` runs `forward` with other values of the block's parameters."""

    def __init__(self, block: nn.Module, method: str) -> None:
        super().__init__()
        self.block, self._method = block, method

    def forward(self) -> Tensor:
        value: Tensor = getattr(type(self.block), self._method).__wrapped__(self.block)
        return value

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the matrix for the given values of parameters, by their names in the block."""
        value: Tensor = torch.func.functional_call(self, {f"block.{name}": value for name, value in values.items()})
        return value

    def hold(self, leaf: Tensor) -> None:
        """Makes the method of the block that computes the matrix return `leaf` instead."""
        setattr(self.block, f"derived_{self._method}", leaf)


def _values(weight: DerivedWeight, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the f32 values of the parameters that a matrix reads, by their names in the block."""
    return {name.removeprefix(f"{weight.at}."): values[name].detach().float() for name in weight.params}
