"""Symmetric integer codes with one float16 scale a row: what `round` and `gptq` have in common.

A value is code * scale, the code in [-(2^(bits-1) - 1), 2^(bits-1) - 1] and one byte each. Codes are not
packed: brotli reaches their entropy from bytes, and packed bits hide it (13 % larger at int6, 25 % at int5).
A row is one index of the first axis; the other axes are flattened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, ValidationError

from specc.compiler.quant.scheme import Scheme, SchemeError, Stored, check_arrays

if TYPE_CHECKING:
    from torch import Tensor

    from specc.compiler.quant.scheme import Array

SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
LARGEST_SCALE = 65504.0  # the largest finite float16


class PerRow(Scheme):
    """Integer codes and row scales. `bits` is narrowed by each scheme.

    `clip_floor` is the least |w| that maps to the largest code: rows smaller than it share one step and so
    compress better. Parameter-golf's records use 1.0 (their scale is at least 1/31 at int6); 0 lets every row
    have its own.
    """

    scheme: str
    bits: int
    clip_floor: Annotated[float, Field(ge=0, le=65504)] = 0.0

    @property
    def top(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def label(self) -> str:
        return f"int{self.bits} {self.scheme}, per row"

    def bits_per_value(self) -> float:
        return float(self.bits)

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        return (Stored("codes", "i8", shape), Stored("scale", "f16", shape[:1]))

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) < 2:
            return f"{self.label()} needs rows and columns, and the shape is {list(shape)}"
        return f"the shape {list(shape)} holds no values" if math.prod(shape) == 0 else None

    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        import torch

        check_arrays(self.stored(shape), arrays)
        codes = torch.from_numpy(arrays["codes"].copy())
        scale = torch.from_numpy(arrays["scale"].copy()).float()
        # Compared as int16, because |-128| is -128 in int8.
        if bool((codes.to(torch.int16).abs() > self.top).any()):
            raise SchemeError(f"a code is outside [-{self.top}, {self.top}]")
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise SchemeError("a row scale is not a positive number")
        return dequantized(codes, scale)

    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        """(bits - 1.35) / 8 bytes a value and 2 bytes a row.

        Source: brotli-11 comes within 1 % of the order-0 entropy of the codes, which for trained matrices
        with row clips near the maximum was 3.64 bits a value at int5 and 4.68 at int6 (heavy-tailed 1024 x
        1024), and 3.65 for parameter-golf PR 1105 at nearly all int5. Entropy is linear in bits, one for one;
        at int2, where most codes are 0, this is an upper bound.
        """
        return math.ceil(math.prod(shape) * (self.bits - 1.35) / 8) + 2 * shape[0]

    def with_bits(self, bits: int) -> Self:
        try:
            return type(self)(**{**self.model_dump(), "bits": bits})
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise SchemeError(f"{self.scheme} cannot store {bits} bits: {reason}") from error

    def scales(self, clip: Tensor) -> Tensor:
        """The row scales, float16, that map each of `clip` (the |w| of the largest code, any shape) to `top`.

        Rounded up to a float16, so that no value within the clip leaves the codes; never below 2^-24, which
        is what a row of zeros gets. Raises SchemeError when a scale would exceed float16.
        """
        import torch

        exact = (clip.double().clamp(min=self.clip_floor) / self.top).clamp(min=SMALLEST_SCALE)
        if float(exact.max()) > LARGEST_SCALE:
            raise SchemeError(
                f"|w| reaches {float(clip.max()):.4g}, and a float16 scale of int{self.bits} ends at "
                f"{LARGEST_SCALE * self.top:.4g}"
            )
        nearest = exact.half()
        # Positive float16 values are ordered like their bits, so the next one up is the bits plus one.
        up = (nearest.view(torch.int16) + 1).view(torch.float16)
        return torch.where(nearest.double() < exact, up, nearest)

    def nearest(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The codes nearest to `weight` [rows, columns], float64; halves go to the even code."""
        return (weight.double() / scale.double()[:, None]).round_().clamp_(-self.top, self.top)


def arrays_of(codes: Tensor, scale: Tensor, shape: tuple[int, ...]) -> dict[str, Array]:
    """What is stored: int8 codes of `shape` and float16 scales."""
    import torch

    return {"codes": codes.to(torch.int8).reshape(shape).cpu().numpy(), "scale": scale.cpu().numpy()}


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """code * scale in float32: one exact conversion each and one rounding, so no device can differ."""
    rows = scale.float().reshape(-1, *([1] * (codes.dim() - 1)))
    return codes.float() * rows


def row_quantile(magnitude: Tensor, quantile: float) -> Tensor:
    """The `quantile` of each row of `magnitude`, whose rows are sorted, linearly interpolated."""
    position = quantile * (magnitude.shape[1] - 1)
    low = math.floor(position)
    high = min(low + 1, magnitude.shape[1] - 1)
    return magnitude[:, low].lerp(magnitude[:, high], position - low)
