"""Symmetric integer codes with one float16 scale per row: the base class of `round`, `gptq` and `int8`.

A value is code * scale. A code is in [-(2^(bits-1) - 1), 2^(bits-1) - 1] and takes one byte. Codes are not packed,
because brotli compresses whole bytes almost to their entropy. Files with packed bits are 13 % larger at int6, and 25 %
larger at int5. A row consists of the values along the last dim.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, TypeGuard

from pydantic import Field, ValidationError

from specc.compiler.ir.types import Tensor
from specc.compiler.quant.entropy import normal_bits, normal_clip
from specc.compiler.quant.low_rank import bits as correction_bits
from specc.compiler.quant.low_rank import correction
from specc.compiler.quant.low_rank import product as correction_product
from specc.compiler.quant.low_rank import stored as correction_arrays
from specc.compiler.quant.scheme import Array, Scheme, SchemeError, Stored, check_arrays, check_codes
from specc.compiler.strict import later

SMALLEST_SCALE = 2.0**-24  # smallest positive float16
LARGEST_SCALE = 65504.0  # largest finite float16


class PerRow(Scheme):
    """Integer codes and row scales.

    Attributes:
        bits: the number of bits per code.
        clip_floor: the smallest |w| that gets the largest code. Rows with only smaller values all have the same step,
            and therefore compress better. Records of parameter-golf use 1.0: a scale is then at least 1/31 at int6.
            With 0, each row has a separate step.
        correction_rank: the rank of a low-rank correction of the rounding error. The correction is stored in 2 and 4
            bits.
    """

    scheme: str
    bits: int
    clip_floor: Annotated[float, Field(ge=0, le=65504)] = 0.0
    correction_rank: Annotated[int, Field(ge=0, le=256)] = later(0)

    has_grid: ClassVar[bool] = True

    @property
    def top(self) -> int:
        """Returns the largest code. The smallest code is the negative of the largest code."""
        return (1 << (self.bits - 1)) - 1

    def label(self) -> str:
        mended = f", rank {self.correction_rank} correction" if self.correction_rank else ""
        return f"int{self.bits} {self.scheme}, per row{mended}"

    def bits_per_value(self) -> float:
        return float(self.bits)

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        codes = (Stored("codes", "i8", shape), Stored("scale", "f16", shape[:-1]))
        if not self.correction_rank:
            return codes
        return (*codes, *correction_arrays(shape[0], math.prod(shape[1:]), self.correction_rank))

    def row_codes(self, shape: tuple[int, ...]) -> int | str:
        return f"a kernel cannot decode {self.label()}" if self.correction_rank else self.bits

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) < 2:
            return f"`scheme: {self.scheme}` needs rows and columns, but the shape is {list(shape)}"
        if len(shape) > 2 and self.correction_rank:
            return f"a correction needs a matrix, but the shape is {list(shape)}"
        return f"the shape {list(shape)} holds no values" if math.prod(shape) == 0 else None

    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        import torch

        check_arrays(self.stored(shape), arrays)
        codes = torch.from_numpy(arrays["codes"].copy())
        scale = torch.from_numpy(arrays["scale"].copy()).float()
        check_codes(codes, self.top)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise SchemeError("a row scale is not a positive number")
        plain = dequantized(codes, scale)
        if not self.correction_rank:
            return plain
        return (plain.double() + correction_product(arrays).reshape(shape)).float()

    def mended(self, arrays: dict[str, Array], weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        """Returns `arrays`, the codes and scales of `weight`. If the scheme has a low-rank correction, the result also
        contains the arrays of the correction."""
        import torch

        if not self.correction_rank:
            return arrays
        plain = dequantized(torch.from_numpy(arrays["codes"]), torch.from_numpy(arrays["scale"]))
        error = weight.detach().double() - plain.to(weight.device).double()
        return arrays | correction(error.flatten(1), self.correction_rank, hessian)

    def with_correction(self, rank: int) -> Self:
        return self.model_copy(update={"correction_rank": rank})

    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the entropy of codes of normally distributed rows (entropy.py), plus 2 bytes per row and the packed
        correction.

        This is the size of a model after little training. Trained matrices with clips near the maximum took 3.65 bits
        per value at int5. Normally distributed rows of 512 values take 4.28 bits per value.
        """
        bits = normal_bits(self.normal_clip(shape[-1]), self.top)
        codes = math.ceil(math.prod(shape) * bits / 8) + 2 * math.prod(shape[:-1])
        return codes + math.ceil(correction_bits(shape[0], math.prod(shape[1:]), self.correction_rank) / 8)

    def with_bits(self, bits: int) -> Self:
        try:
            return type(self)(**{**self.model_dump(), "bits": bits})
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise SchemeError(f"{self.scheme} cannot store {bits} bits: {reason}") from error

    def scales(self, clip: Tensor) -> Tensor:
        """Returns the float16 row scales for which `clip`, the |w| of the largest code, maps to the code `top`.

        Scales have the shape of `clip`. Scales are rounded up to float16, so no value within the clip exceeds the
        largest code. A scale is at least 2^-24, the scale of a row of zeros. Raises SchemeError if a scale exceeds the
        range of float16.
        """
        exact = self._exact_scales(clip)
        if float(exact.max()) > LARGEST_SCALE:
            raise SchemeError(
                f"|w| reaches {float(clip.max()):.4g}, but a float16 scale of int{self.bits} allows at most "
                f"{LARGEST_SCALE * self.top:.4g}"
            )
        return _rounded_up(exact)

    def on_grid(self, weights: Tensor) -> Tensor:
        flat = weights.float().flatten(0, -2)
        scale = _rounded_up(self._exact_scales(self.clip_without_data(flat)).clamp(max=LARGEST_SCALE)).float()[:, None]
        codes = (flat / scale).round_().clamp_(-self.top, self.top)
        return (codes * scale).reshape(weights.shape)

    def normal_clip(self, columns: int) -> float:
        """Returns the approximate clip of normally distributed rows with `columns` values. The unit is the standard
        deviation of a row. If the scheme tries several clips, returns the smallest clip."""
        return normal_clip(columns)

    @abstractmethod
    def clip_without_data(self, rows: Tensor) -> Tensor:
        """Returns the clip of each row of `rows` [N, columns], for quantization without calibration data. The clip is
        the |w| that gets the largest code."""

    def _exact_scales(self, clip: Tensor) -> Tensor:
        return (clip.double().clamp(min=self.clip_floor) / self.top).clamp(min=SMALLEST_SCALE)

    def nearest(self, weight: Tensor, scale: Tensor) -> Tensor:
        return (weight.double() / scale.double()[:, None]).round_().clamp_(-self.top, self.top)


def correctable(scheme: Scheme) -> TypeGuard[PerRow]:
    return isinstance(scheme, PerRow) and not scheme.integer


def largest_rank(shape: tuple[int, ...]) -> int:
    """Returns the largest useful rank of a correction: the smaller number of rows and columns. The rank is 0 for the
    matrices of experts, which cannot be corrected."""
    return min(shape) if len(shape) == 2 else 0


def arrays_of(codes: Tensor, scale: Tensor, shape: tuple[int, ...]) -> dict[str, Array]:
    """Returns the stored arrays: int8 codes of `shape` and float16 scales, one per row."""
    import torch

    return {
        "codes": codes.to(torch.int8).reshape(shape).cpu().numpy(),
        "scale": scale.reshape(shape[:-1]).cpu().numpy(),
    }


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns code * scale in float32. The conversions are exact and only the product rounds, so all devices return
    the same result."""
    return codes.float() * scale.float().unsqueeze(-1)


def _rounded_up(exact: Tensor) -> Tensor:
    """Rounds positive float64 numbers in the range of float16 up to float16."""
    import torch

    nearest = exact.half()
    # Positive float16 values are ordered like their bits, so the next larger value has the bits plus one.
    up = (nearest.view(torch.int16) + 1).view(torch.float16)
    return torch.where(nearest.double() < exact, up, nearest)


def row_quantile(magnitude: Tensor, quantile: float) -> Tensor:
    """Returns the `quantile` of each row of `magnitude`, with linear interpolation. The rows must be sorted."""
    position = quantile * (magnitude.shape[1] - 1)
    low = math.floor(position)
    high = min(low + 1, magnitude.shape[1] - 1)
    return magnitude[:, low].lerp(magnitude[:, high], position - low)
