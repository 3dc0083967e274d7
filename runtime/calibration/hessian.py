"""Accumulates the Hessians X^T X of linear inputs, for GPTQ and bit allocation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.runtime.errors import QuantizeError

# The number of rows converted to the accumulation dtype at once: 64 MiB of f64 at 1,024 features.
CHUNK_ROWS = 8192


class Hessians:
    """Sums of X^T X by name. Memory: features^2 numbers per name.

    Args:
        dtype: the accumulation dtype: f64, or f32 if f64 is too slow. With f32, TF32 must be off.
        device: the device of the sums. Each product is computed on the device of its input and then moved, so that an
            accelerator stores one product at a time. None keeps each sum on the device of its inputs.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> None:
        self._dtype = dtype
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Adds the rows of `x` [..., features], any float dtype. `x` is detached, so no gradient is recorded.

        Raises QuantizeError if the number of features differs from that of earlier calls with this name.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        features = rows.shape[1]
        if name not in self._sums:
            where = self._device if self._device is not None else x.device
            self._sums[name] = torch.zeros(features, features, dtype=self._dtype, device=where)
            self._rows[name] = 0
        total = self._sums[name]
        if total.shape[0] != features:
            raise QuantizeError(f"{name}: its input has {features} features, and had {total.shape[0]} before")
        for start in range(0, rows.shape[0], CHUNK_ROWS):
            exact = rows[start : start + CHUNK_ROWS].to(self._dtype)
            if total.device == exact.device:
                total.addmm_(exact.T, exact)
            else:
                total.add_((exact.T @ exact).to(total.device))
        self._rows[name] += rows.shape[0]

    def a_token(self, tokens: int) -> dict[str, Tensor]:
        """Returns X^T X / tokens by name, [features, features] in the accumulation dtype.

        `tokens` is the number of tokens that the model has processed. If a weight has several calls per token, its
        Hessian is the sum over the calls, as the effects of its error on the loss also add up.

        Raises QuantizeError if a name has no rows, or if its sum is NaN or infinite.
        """
        means: dict[str, Tensor] = {}
        for name, total in self._sums.items():
            if self._rows[name] == 0:
                raise QuantizeError(f"{name}: calibration gave its input no rows")
            if not bool(total.isfinite().all()):
                raise QuantizeError(f"{name}: its input holds NaN or infinity", "calibrate from an earlier checkpoint")
            means[name] = total / tokens
        return means


def traces(hessians: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the trace of each Hessian: the sensitivity that ranks parameters for promotion, not divided by size."""
    return {name: float(hessian.diagonal().double().sum()) for name, hessian in hessians.items()}
