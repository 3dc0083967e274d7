"""Weights, inputs and biases of products as whole numbers: int8 codes times int8 codes, sums in int32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.quant.rows import PerRow, arrays_of, dequantized
from specc.compiler.quant.scheme import SchemeError, Seen, Stored, check_arrays, check_finite, check_shape
from specc.compiler.strict import later

if TYPE_CHECKING:
    from torch import Tensor

    from specc.compiler.quant.scheme import Array

LARGEST_OFFSET = 2**30  # of a bias in whole numbers: with it no sum of int8 products leaves int32
FAINTEST = 2.0**-12  # of a row's largest weight, as a share of the matrix's: a row below it keeps that row's step


class Int8(PerRow):
    """Products computed in int8. A weight [N, K] is codes in [-127, 127] and one scale s_w a row; its input is
    quantized with one scale s_in, the largest magnitude that calibration saw divided by 127; the bias beside it is
    int32, round(b / (s_in * s_w)), and joins the int32 sums exactly. Symmetric throughout: there is no zero point.

    `weights: per_tensor` gives all rows of a matrix one scale.
    """

    integer: ClassVar[bool] = True

    scheme: Literal["int8"] = "int8"
    bits: Literal[8] = 8
    weights: Literal["per_channel", "per_tensor"] = "per_channel"
    activations: Literal["per_tensor"] = "per_tensor"
    correction_rank: Annotated[int, Field(ge=0, le=0)] = later(
        0
    )  # a correction would be a product of floats beside that of whole numbers

    def label(self) -> str:
        return f"int8 products, {self.weights.replace('_', ' ')}"

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        if len(shape) == 1:
            return (Stored("codes", "i32", shape), Stored("scale", "f32", shape))
        return (*super().stored(shape), Stored("input_scale", "f32", (1,)))

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) not in (1, 2):
            return f"{self.label()} takes the weight [N, K] or the bias [N] of a product, not {list(shape)}"
        return None if len(shape) == 1 else super().rejects(shape)

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        raise SchemeError("int8 needs the range of its product's input, and nothing was calibrated")

    def quantize_seen(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """A weight wants `seen.peak`, a bias `seen.weight`. Raises SchemeError for what cannot be a whole number."""
        shape = tuple(weight.shape)
        check_shape(self, shape)
        check_finite(weight)
        if len(shape) == 1:
            return self._bias(weight, seen.weight)
        if seen.peak is None:
            return self.quantize(weight, None)
        scale = self.scales(self.clip_without_data(weight.detach().double()))
        codes = self.nearest(weight.detach(), scale)
        return {**arrays_of(codes, scale, shape), "input_scale": input_scale(seen.peak)}

    def on_grid(self, weights: Tensor) -> Tensor:
        """Of biases, whose steps are those of their input and far below them, what they are."""
        import torch

        if weights.dim() == 2:
            return weights
        return torch.stack([super(Int8, self).on_grid(weight[None])[0] for weight in weights])

    def clip_without_data(self, rows: Tensor) -> Tensor:
        magnitude = rows.abs().amax(1)
        faintest = magnitude.max() if self.weights == "per_tensor" else magnitude.max() * FAINTEST
        return magnitude.clamp(min=faintest)

    def _bias(self, bias: Tensor, weight: Mapping[str, Array] | None) -> dict[str, Array]:
        import torch

        if weight is None:
            raise SchemeError("int8 takes a vector only as the bias of a product in int8")
        scale = steps(weight)
        if scale.shape != bias.shape:
            raise SchemeError(f"its weight has {len(scale)} rows, and it has {len(bias)} numbers")
        codes = (bias.detach().cpu().double() / scale.double()).round()
        if float(codes.abs().max()) > LARGEST_OFFSET:
            worst = int(codes.abs().argmax())
            raise SchemeError(
                f"its number {worst}, {float(bias[worst]):.4g}, is {float(codes[worst]):.4g} steps of int32"
            )
        return {"codes": codes.to(torch.int32).numpy(), "scale": scale.numpy()}

    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        import torch

        check_arrays(self.stored(shape), arrays)
        if len(shape) == 1:
            scale = torch.from_numpy(arrays["scale"].copy())
            codes = torch.from_numpy(arrays["codes"].copy())
            _check_positive("a scale", scale)
            if int(codes.long().abs().max()) > LARGEST_OFFSET:
                raise SchemeError(f"a code is outside [-{LARGEST_OFFSET}, {LARGEST_OFFSET}]")
            return (codes.double() * scale.double()).float()
        _check_positive("a row scale", torch.from_numpy(arrays["scale"].copy()))
        _check_positive("its input scale", torch.from_numpy(arrays["input_scale"].copy()))
        codes = torch.from_numpy(arrays["codes"].copy())
        if bool((codes == -128).any()):
            raise SchemeError(f"a code is outside [-{self.top}, {self.top}]")
        return dequantized(codes, torch.from_numpy(arrays["scale"].copy()))

    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        return super().estimate_bytes(shape) if len(shape) > 1 else self.stored(shape)[0].bytes * 2


def input_scale(peak: float) -> Array:
    """The scale f32 [1] of an input whose largest magnitude is `peak`; 1 / 127 for one that is always 0."""
    import numpy as np

    return np.array([(peak or 1.0) / 127], dtype=np.float32)


def steps(weight: Mapping[str, Array]) -> Tensor:
    """s_in * s_w, f32 [N]: what one of the int32 sums is worth, for the stored arrays of a weight."""
    import torch

    return torch.from_numpy(weight["input_scale"].copy()) * torch.from_numpy(weight["scale"].copy()).float()


def _check_positive(what: str, scale: Tensor) -> None:
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise SchemeError(f"{what} is not a positive number")
