"""Accumulates the Hessians X^T X of the inputs X of linear layers, for GPTQ and bit allocation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.runtime.errors import QuantizeError

# The number of rows converted to the accumulation dtype at once. With 1,024 features, these rows are 64 MiB of f64.
CHUNK_ROWS = 8192


class Hessians:
    """Accumulates sums of X^T X, each [features, features]. The key of a sum is the name of the weight that multiplies
    the inputs X.

    Args:
        dtype: the accumulation dtype: f64, or f32 if f64 is too slow. With f32, TF32 must be off.
        device: the device of the sums. Each product X^T X is computed on the device of X and then moved, so that a GPU
            stores only one product at a time. None selects the device of X.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> None:
        self._dtype = dtype
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def add(self, name: str, x: Tensor, ends: Tensor | None = None) -> None:
        """Adds the rows of `x` [..., features], of any float dtype, to the sum `name`. Records no gradient.

        If `ends` i32 [experts] is given, each expert has a separate sum, and the sums have the shape [experts,
        features, features]. The rows must be sorted by expert. `ends` has the cumulative number of rows per expert.

        Raises QuantizeError if an earlier call with the same `name` had another number of features.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        features = rows.shape[1]
        experts = () if ends is None else (len(ends),)
        if name not in self._sums:
            where = self._device if self._device is not None else x.device
            self._sums[name] = torch.zeros(*experts, features, features, dtype=self._dtype, device=where)
            self._rows[name] = 0
        total = self._sums[name]
        if total.shape[-1] != features:
            raise QuantizeError(f"{name}: the input has {features} features, but had {total.shape[-1]} before")
        if ends is None:
            self._add(total, rows)
        else:
            for of_expert, part in zip(total, rows_of_experts(rows, ends), strict=True):
                self._add(of_expert, part)
        self._rows[name] += rows.shape[0]

    def _add(self, total: Tensor, rows: Tensor) -> None:
        for start in range(0, rows.shape[0], CHUNK_ROWS):
            exact = rows[start : start + CHUNK_ROWS].to(self._dtype)
            if total.device == exact.device:
                total.addmm_(exact.T, exact)
            else:
                total.add_((exact.T @ exact).to(total.device))

    def per_token(self, tokens: int) -> dict[str, Tensor]:
        """Returns each sum divided by `tokens`, in the accumulation dtype: [features, features], or [experts, features,
        features].

        `tokens` is the number of tokens that the model has processed. If a weight is used several times per token, its
        result is the sum over the uses.

        Raises QuantizeError if no rows were added for a name, or if a sum is not finite.
        """
        means: dict[str, Tensor] = {}
        for name, total in self._sums.items():
            if self._rows[name] == 0:
                raise QuantizeError(f"{name}: no calibration text reached this parameter")
            if not bool(total.isfinite().all()):
                message = f"{name}: the input contains NaN or infinity"
                raise QuantizeError(message, "calibrate from an earlier checkpoint")
            means[name] = total / tokens
        return means


def rows_of_experts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Splits `rows` [N, ...], which are sorted by expert, into the rows of each expert.

    `ends` i32 [experts] has the cumulative number of rows per expert.
    """
    return torch.split(rows, ends.diff(prepend=ends.new_zeros(1)).tolist())


def traces(hessians: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the trace of each Hessian, which is the sum of its diagonal.

    Promotion gives more bits to the parameters with the largest traces.
    """
    return {name: float(hessian.diagonal(dim1=-2, dim2=-1).double().sum()) for name, hessian in hessians.items()}
