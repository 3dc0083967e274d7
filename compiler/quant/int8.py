"""Weights, inputs and biases of products as whole numbers: int8 codes times int8 codes, sums in int32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.ops.quantized import LARGEST_K, step_of
from specc.compiler.quant.entropy import normal_bits
from specc.compiler.quant.gptq_solver import factorize, solve, weighted_error
from specc.compiler.quant.rows import LARGEST_SCALE, SMALLEST_SCALE, PerRow, arrays_of, dequantized
from specc.compiler.quant.scheme import Array, Range, SchemeError, Seen, Stored, check_arrays, check_finite, check_shape
from specc.compiler.strict import later

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_OFFSET = 2**30  # of a bias in whole numbers: with it no sum of int8 products leaves int32
SMALLEST_INPUT, LARGEST_INPUT = 2.0**-40, 2.0**40  # of an input's scale: within, no code, step or output leaves f32
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0 is one scale for all features
QUIETEST = 2.0**-6  # of a feature's largest magnitude, as a share of all: what was hardly seen may come louder later
LEAST_DAMPING, BLOCK = 1e-9, 128  # of GPTQ's solver
# A row below this share of the largest weight keeps the step that such a row has.
FAINTEST = 2.0**-12


class Int8(PerRow):
    """Products computed in int8. A weight [N, K] is codes in [-127, 127] and one scale s_w a row; its input is
    quantized with one scale s_in, the largest magnitude that calibration saw divided by 127; the bias beside it is
    int32, round(b / (s_in * s_w)), and joins the int32 sums exactly. Symmetric throughout: there is no zero point.

    `weights: per_tensor` gives all rows of a matrix one scale. `activations: per_channel` gives each feature k of the
    input a scale s_in r_k, r_k <= 1, and the weight that is rounded is W_nk r_k: the sums are the same, and what is
    small beside the other features keeps more digits (SmoothQuant, Xiao et al. 2022, whose exponent is chosen here by
    the error to expect, see `input_scale`).

    `activation_bits: 16` gives the input 16 bits, as the 16x8 of TensorFlow Lite does: it is two codes,
    s_in (q1 + q2 / 254), each multiplied in int8 with the same weight. Of the hidden weights of an LSTM the input is h,
    which is rounded at every step.
    """

    integer: ClassVar[bool] = True

    scheme: Literal["int8"] = "int8"
    bits: Literal[8] = 8
    weights: Literal["per_channel", "per_tensor"] = "per_channel"
    activations: Literal["per_tensor", "per_channel"] = "per_tensor"
    activation_bits: Literal[8, 16] = later(8)
    correction_rank: Annotated[int, Field(ge=0, le=0)] = later(
        0
    )  # a correction would be a product of floats beside that of whole numbers

    def label(self) -> str:
        inputs = [" per channel"] if self.activations == "per_channel" else []
        inputs += [f" in {self.activation_bits} bits"] if self.activation_bits != 8 else []
        return f"int8 products, {self.weights.replace('_', ' ')}{', inputs' if inputs else ''}{''.join(inputs)}"

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        if len(shape) == 1:
            return (Stored("codes", "i32", shape), Stored("scale", "f32", shape))
        return (*super().stored(shape), Stored("input_scale", "f32", (shape[1] if self.input_by_feature else 1,)))

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) not in (1, 2):
            return f"{self.label()} takes the weight [N, K] or the bias [N] of a product, not {list(shape)}"
        if len(shape) == 2 and shape[1] > LARGEST_K:
            return f"{self.label()} sums at most {LARGEST_K:,} products in int32, and K is {shape[1]:,}"
        return None if len(shape) == 1 else super().rejects(shape)

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        raise SchemeError("int8 needs the range of its product's input, and nothing was calibrated")

    def quantize_seen(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """A weight wants `seen.input_scale`, a bias `seen.weight`. Raises SchemeError for what is no whole number."""
        shape = tuple(weight.shape)
        check_shape(self, shape)
        check_finite(weight)
        if len(shape) == 1:
            return self._bias(weight, seen.weight)
        if seen.input_scale is None:
            return self.quantize(weight, None)
        given = seen.input_scale.detach().cpu().float().numpy()
        _check_scales("the scale of its input", given, SMALLEST_INPUT, LARGEST_INPUT)
        weight = weight.detach() * _shares(given).to(weight)
        scale = self.scales(self.clip_without_data(weight.double()))
        codes = self.nearest(weight, scale)
        if seen.hessian is not None:
            codes = self._solved(weight.double(), scale, codes, seen, given)
        return {**arrays_of(codes, scale, shape), "input_scale": given}

    def _solved(self, weight: Tensor, scale: Tensor, nearest: Tensor, seen: Seen, given: Array) -> Tensor:
        """The codes of GPTQ, or of a row whose sums they make no better the `nearest`. The Hessian is the mean of x^T x
        for inputs x. What is multiplied is x_k / r_k, rounded: its second moments, with the rounding's own variance,
        which is all the damping that there is."""
        import torch

        assert seen.hessian is not None
        share, hessian = _shares(given).to(weight), seen.hessian.to(weight)
        moments = hessian / share[:, None] / share if len(share) > 1 else hessian.clone()
        moments.diagonal().add_((float(given.max()) * step_of(self.activation_bits)) ** 2 / 12)
        factor = factorize(moments, LEAST_DAMPING, "descending")
        solved = solve(weight, scale.double(), factor, self.top, BLOCK)
        wrong, still = (
            weighted_error(weight - codes * scale.double()[:, None], factor.hessian) for codes in (nearest, solved)
        )
        return torch.where((still < wrong)[:, None], solved, nearest)

    @property
    def input_bits(self) -> Literal[8, 16]:
        return self.activation_bits

    @property
    def input_by_feature(self) -> bool:
        return self.activations == "per_channel"

    def input_scale(self, seen: Range, weights: Sequence[Tensor]) -> Tensor:
        """The scale f32 [1] or [K] of an input that `weights`, [N, K] each, are multiplied by; 1 / 127 for one that is
        always 0.

        By feature it is s_k = top^(1 - a) * largest_k^a / 127, top the largest of all, with the exponent a of
        EXPONENTS that makes the expected squared error of all sums least: s_k^2 / 12 * W_nk^2 of rounding the input,
        and step_n^2 / 12 * E[x_k^2] / s_k^2 of rounding W_nk s_k to the step of its row, summed over n and k. For
        inputs of 16 bits it is chosen alike, as if they had 8.
        """
        top = float(seen.largest.max())
        if not self.input_by_feature or not top:
            size = len(seen.largest) if self.input_by_feature else 1
            return seen.largest.new_full((size,), (top or 1.0) / 127).float()
        largest = seen.largest.clamp(min=top * QUIETEST)
        choices = [top ** (1 - a) * largest**a / 127 for a in EXPONENTS]

        def error(scale: Tensor) -> float:
            scaled = [weight.detach().double() * scale for weight in weights]
            steps = [(block.abs().amax(1) / 127).square().sum() for block in scaled]
            reading = seen.square / scale.square()
            return float(sum(block.square().sum() for block in scaled) + reading.sum() * sum(steps))

        chosen: Tensor = min(choices, key=error)
        return chosen.float()

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
            _check_scales("a scale", arrays["scale"], SMALLEST_INPUT * SMALLEST_SCALE, LARGEST_INPUT * LARGEST_SCALE)
            scale = torch.from_numpy(arrays["scale"].copy())
            codes = torch.from_numpy(arrays["codes"].copy())
            if int(codes.long().abs().max()) > LARGEST_OFFSET:
                raise SchemeError(f"a code is outside [-{LARGEST_OFFSET}, {LARGEST_OFFSET}]")
            return (codes.double() * scale.double()).float()
        _check_scales("a row scale", arrays["scale"], SMALLEST_SCALE, LARGEST_SCALE)
        _check_scales("the scale of its input", arrays["input_scale"], SMALLEST_INPUT, LARGEST_INPUT)
        codes = torch.from_numpy(arrays["codes"].copy())
        if bool((codes == -128).any()):
            raise SchemeError(f"a code is outside [-{self.top}, {self.top}]")
        return (dequantized(codes, torch.from_numpy(arrays["scale"].copy())) / _shares(arrays["input_scale"])).float()

    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        """The entropy of the codes of normal rows (entropy.py), and 2 % that brotli-11 needs above it for the small
        matrices of int8 models, unless features have scales of their own, which give the weights heavier tails; all of
        the other arrays of a weight; 5 of the 8 bytes of a number of a bias.

        Source: poly_attn after 30 steps, 413 kB, by feature 406; 1.7 bytes of a bias's code and 3.1 of its scale.
        """
        if len(shape) == 1:
            return 5 * shape[0]
        codes, *others = self.stored(shape)
        bits = normal_bits(self.normal_clip(shape[1]), self.top) * (1.0 if self.input_by_feature else 1.02)
        return math.ceil(codes.bytes * bits / 8) + sum(stored.bytes for stored in others)


def steps(weight: Mapping[str, Array]) -> Tensor:
    """s_in * s_w, f32 [N]: what one of the int32 sums is worth, for the stored arrays of a weight."""
    import torch

    return float(weight["input_scale"].max()) * torch.from_numpy(weight["scale"].copy()).float()


def _shares(input_scale: Array) -> Tensor:
    """r_k, f64 [1] or [K]: the scale of each feature of an input as a share of the largest, s_in."""
    import torch

    scale = torch.from_numpy(input_scale.copy()).double()
    return scale / scale.max()


def _check_scales(what: str, scale: Array, smallest: float, largest: float) -> None:
    """Raises SchemeError, naming the first that is not, unless all are numbers from `smallest` to `largest`."""
    wrong = ~((scale >= smallest) & (scale <= largest))
    if wrong.any():
        where = int(wrong.argmax())
        raise SchemeError(
            f"{what}, number {where} of {len(scale)}, is {scale[where]:.6g}; wants {smallest:.3g} to {largest:.3g}"
        )
