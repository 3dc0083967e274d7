"""Accumulates the Hessians X^T X that GPTQ and the allocation of bits read, one per linear input."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.runtime.errors import QuantizeError

# Rows converted to the accumulation dtype at once: 64 MiB of float64 at 1,024 features.
CHUNK_ROWS = 8192


class Hessians:
    """Sums of X^T X by name.

    `dtype` is float64, or float32 where that is too slow (then TF32 must be off). With `device` the sums are
    kept there and each batch's product is made where the batch is, so an accelerator holds one product at a
    time; without it they stay beside their inputs. Memory: features^2 numbers per name.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> None:
        self._dtype = dtype
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Adds the rows of `x` [..., features], any float dtype. No gradient is recorded.

        Raises QuantizeError when the number of features differs from that of earlier calls.
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
        """X^T X / tokens by name, [features, features], where `tokens` went through the model: a sum over the calls of
        a weight that each of them meets several times. What its error does to the loss adds up as they do.

        Raises QuantizeError for a name that got no rows, or NaN or infinity.
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
    """The trace of each Hessian: the sensitivity by which bits are allocated, not divided by its size."""
    return {name: float(hessian.diagonal().double().sum()) for name, hessian in hessians.items()}
