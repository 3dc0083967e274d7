"""Rounds each row of a parameter to the nearest symmetric integers, without calibration data."""

from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.ir.types import Tensor
from specc.compiler.quant.entropy import normal_clip
from specc.compiler.quant.rows import PerRow, arrays_of, row_quantile
from specc.compiler.quant.scheme import Array, check_weight


class Round(PerRow):
    """Symmetric rounding to nearest with one scale per row, for example for embeddings.

    Attributes:
        clip: a quantile of a row's absolute values, from 0 to 1. The value at the quantile gets the largest code, and
            larger values are clipped. With 1, the quantile is the maximum, and nothing is clipped.
    """

    scheme: Literal["round"] = "round"
    bits: Annotated[int, Field(ge=2, le=8)]
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        shape = tuple(weight.shape)
        check_weight(self, weight)
        rows = weight.detach().double().reshape(-1, shape[-1])
        scale = self.scales(self.clip_without_data(rows))
        return self.mended(arrays_of(self.nearest(rows, scale), scale, shape), weight, None)

    def normal_clip(self, columns: int) -> float:
        return normal_clip(columns, self.clip)

    def clip_without_data(self, rows: Tensor) -> Tensor:
        magnitude = rows.abs()
        return magnitude.amax(1) if self.clip == 1.0 else row_quantile(magnitude.sort(1).values, self.clip)
