"""Rounds each row of a parameter to the nearest symmetric integers, without calibration data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from specc.compiler.quant.entropy import normal_clip
from specc.compiler.quant.rows import PerRow, arrays_of, row_quantile
from specc.compiler.quant.scheme import Array, check_weight

if TYPE_CHECKING:
    from torch import Tensor


class Round(PerRow):
    """Symmetric rounding to nearest with one scale per row, for example for embeddings.

    Attributes:
        clip: the quantile of |row| that maps to the largest code; larger values are clipped. 1 is the maximum.
    """

    scheme: Literal["round"] = "round"
    bits: Annotated[int, Field(ge=2, le=8)]
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        shape = tuple(weight.shape)
        check_weight(self, weight)
        rows = weight.detach().double().reshape(shape[0], -1)
        scale = self.scales(self.clip_without_data(rows))
        return self.mended(arrays_of(self.nearest(rows, scale), scale, shape), weight, None)

    def normal_clip(self, columns: int) -> float:
        return normal_clip(columns, self.clip)

    def clip_without_data(self, rows: Tensor) -> Tensor:
        magnitude = rows.abs()
        return magnitude.amax(1) if self.clip == 1.0 else row_quantile(magnitude.sort(1).values, self.clip)
