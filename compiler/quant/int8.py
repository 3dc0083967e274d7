"""Matrix products of int8 codes, with sums in int32: the quantization of weights, inputs and biases."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.ir.types import Tensor
from specc.compiler.ops.quantized import LARGEST_K, step_of
from specc.compiler.quant.entropy import normal_bits
from specc.compiler.quant.gptq_solver import factorize, solve, weighted_error
from specc.compiler.quant.rows import LARGEST_SCALE, SMALLEST_SCALE, PerRow, arrays_of, dequantized
from specc.compiler.quant.scheme import Array, Range, SchemeError, Seen, Stored, check_arrays, check_codes, check_weight
from specc.compiler.strict import later

LARGEST_OFFSET = 2**30  # the largest |code| of a bias, with which the sums of int8 products fit in int32
SMALLEST_INPUT, LARGEST_INPUT = 2.0**-40, 2.0**40  # limits of an input scale, within which f32 can represent all values
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # candidate exponents; 0 gives one scale for all features
# The smallest range of a feature relative to the largest, because a feature that is rare in calibration may become
# larger later
QUIETEST = 2.0**-6
LEAST_DAMPING, BLOCK = 1e-9, 128  # the least damping and the block size of GPTQ's solver
# The smallest maximum of a row, relative to the largest |w| of the matrix. A row with a smaller maximum gets the step
# of a row with this maximum.
FAINTEST = 2.0**-12


class Int8(PerRow):
    """Matrix products that are computed on int8 codes.

    A weight [N, K] is stored as codes in [-127, 127] with one scale s_w per row. The input has one scale s_in: the
    largest magnitude of the input during calibration, divided by 127. The bias is int32, round(b / (s_in * s_w)), and
    is added exactly to the int32 sums. All codes are symmetric, without a zero point.

    Attributes:
        weights: `per_channel` has one scale per row of a matrix, `per_tensor` one scale for all rows.
        activations: with `per_channel`, feature k of the input has the scale s_in r_k, where r_k <= 1. The stored
            weights are W_nk r_k, rounded. The result does not change, but features of small magnitude have more
            precision (SmoothQuant, Xiao et al. 2022). r_k is a power of the largest magnitude of feature k. The
            exponent of the power minimizes the expected error.
        activation_bits: 16 quantizes the input to 16 bits, as the 16x8 mode of TensorFlow Lite does. The input is then
            s_in (q1 + q2 / 254) with two int8 codes q1 and q2, and each code is multiplied by the weight. For the
            hidden weights of an LSTM, the input is h, which is rounded at every step.
        correction_rank: always 0, because a correction would add a floating-point product.
    """

    integer: ClassVar[bool] = True

    scheme: Literal["int8"] = "int8"
    bits: Literal[8] = 8
    weights: Literal["per_channel", "per_tensor"] = "per_channel"
    activations: Literal["per_tensor", "per_channel"] = "per_tensor"
    activation_bits: Literal[8, 16] = later(8)
    correction_rank: Annotated[int, Field(ge=0, le=0)] = later(0)  # a correction would add a floating-point product

    def label(self) -> str:
        inputs = [" per channel"] if self.activations == "per_channel" else []
        inputs += [f" in {self.activation_bits} bits"] if self.activation_bits != 8 else []
        return f"int8 products, {self.weights.replace('_', ' ')}{', inputs' if inputs else ''}{''.join(inputs)}"

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        if len(shape) == 1:
            return (Stored("codes", "i32", shape), Stored("scale", "f32", shape))
        return (*super().stored(shape), Stored("input_scale", "f32", (shape[1] if self.input_by_feature else 1,)))

    def row_codes(self, shape: tuple[int, ...]) -> int | str:
        return f"{self.label()} are computed in integers"

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) not in (1, 2):
            return f"{self.label()} takes the weight [N, K] or the bias [N] of a product, not {list(shape)}"
        if len(shape) == 2 and shape[1] > LARGEST_K:
            return f"{self.label()} sums at most {LARGEST_K:,} products in int32, and K is {shape[1]:,}"
        return None if len(shape) == 1 else super().rejects(shape)

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        raise SchemeError("int8 needs the measured range of the product's input, but nothing was calibrated")

    def quantize_seen(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """Quantizes a weight with `seen.input_scale`, or a bias with `seen.weight`, the stored weight of the same
        product.

        Raises SchemeError if `seen` lacks this field, or if a value cannot be quantized.
        """
        shape = tuple(weight.shape)
        check_weight(self, weight)
        if len(shape) == 1:
            return self._bias(weight, seen.weight)
        if seen.input_scale is None:
            return self.quantize(weight, None)
        input_scale = seen.input_scale.detach().cpu().float().numpy()
        _check_scales("the scale of its input", input_scale, SMALLEST_INPUT, LARGEST_INPUT)
        weight = weight.detach() * _shares(input_scale).to(weight)
        scale = self.scales(self.clip_without_data(weight.double()))
        codes = self.nearest(weight, scale)
        if seen.hessian is not None:
            codes = self._solved(weight.double(), scale, codes, seen, input_scale)
        return {**arrays_of(codes, scale, shape), "input_scale": input_scale}

    def _solved(self, weight: Tensor, scale: Tensor, nearest: Tensor, seen: Seen, input_scale: Array) -> Tensor:
        """Returns the codes of GPTQ, or `nearest` for rows whose error GPTQ does not reduce.

        `seen.hessian` is the mean of x^T x for inputs x [.., K]. The stored weights are multiplied by rounded
        values of x_k / r_k, instead of by x_k. r_k is the scale of feature k relative to the largest scale. The solver
        therefore uses the second moments of the rounded values: the second moments of x_k / r_k, plus the variance of
        the rounding. This variance also acts as damping, so the solver adds only LEAST_DAMPING.
        """
        import torch

        assert seen.hessian is not None
        share, hessian = _shares(input_scale).to(weight), seen.hessian.to(weight)
        moments = hessian / share[:, None] / share if len(share) > 1 else hessian.clone()
        moments.diagonal().add_((float(input_scale.max()) * step_of(self.activation_bits)) ** 2 / 12)
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
        """Returns the scale, f32 [1] or [K], of an input that is multiplied by `weights`, [N, K] each. If the input was
        always 0 during calibration, the scale is 1 / 127.

        The scale of feature k is s_k = top^(1 - a) * largest_k^a / 127, where `top` is the maximum of largest_k over k.
        `a` is the number in EXPONENTS with the smallest expected squared error of the products with `weights`.

        This error is the sum over n and k of two terms: s_k^2 / 12 * W_nk^2 for rounding the input, and step_n^2 / 12
        * E[x_k^2] / s_k^2 for rounding W_nk s_k to the step of row n. 16-bit inputs use the exponent of 8-bit inputs.
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
            raise SchemeError("int8 can store a vector only as the bias of an int8 product")
        scale = steps(weight)
        if scale.shape != bias.shape:
            raise SchemeError(f"the bias has {len(bias)} elements, but the weight of its product has {len(scale)} rows")
        codes = (bias.detach().cpu().double() / scale.double()).round()
        if float(codes.abs().max()) > LARGEST_OFFSET:
            worst = int(codes.abs().argmax())
            value, steps_of_value = float(bias[worst]), float(codes[worst])
            raise SchemeError(
                f"element {worst} of the bias is {value:.4g}, which is {steps_of_value:.4g} int32 steps; at most 2^30 "
                "can be stored"
            )
        return {"codes": codes.to(torch.int32).numpy(), "scale": scale.numpy()}

    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        import torch

        check_arrays(self.stored(shape), arrays)
        if len(shape) == 1:
            _check_scales("a scale", arrays["scale"], SMALLEST_INPUT * SMALLEST_SCALE, LARGEST_INPUT * LARGEST_SCALE)
            scale = torch.from_numpy(arrays["scale"].copy())
            codes = torch.from_numpy(arrays["codes"].copy())
            check_codes(codes, LARGEST_OFFSET)
            return (codes.double() * scale.double()).float()
        _check_scales("a row scale", arrays["scale"], SMALLEST_SCALE, LARGEST_SCALE)
        _check_scales("the scale of its input", arrays["input_scale"], SMALLEST_INPUT, LARGEST_INPUT)
        codes = torch.from_numpy(arrays["codes"].copy())
        check_codes(codes, self.top)
        return (dequantized(codes, torch.from_numpy(arrays["scale"].copy())) / _shares(arrays["input_scale"])).float()

    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        """Estimates the compressed bytes of a weight or bias.

        For a weight, the estimate is the entropy of codes of normally distributed rows (entropy.py), plus the other
        arrays. With one input scale per tensor, 2 % are added, because brotli-11 is less effective on the small
        matrices of int8 models. With scales per feature, nothing is added: the scaled weights have heavier tails, so
        their codes have less entropy than the estimate. A bias stores an int32 code and an f32 scale per number, which
        is 8 bytes. The estimate is 5 bytes per number.

        The estimates are based on a measurement of the spec poly_attn after 30 training steps. The measured size is 413
        kB with one input scale per tensor, and 406 kB with scales per feature. For each number of a bias, the code
        takes 1.7 bytes and the scale 3.1 bytes.
        """
        if len(shape) == 1:
            return 5 * shape[0]
        codes, *others = self.stored(shape)
        bits = normal_bits(self.normal_clip(shape[1]), self.top) * (1.0 if self.input_by_feature else 1.02)
        return math.ceil(codes.bytes * bits / 8) + sum(stored.bytes for stored in others)


def steps(weight: Mapping[str, Array]) -> Tensor:
    """Returns s_in * s_w, f32 [N]. Entry n is the number that 1 represents in the int32 sums of row n. `weight` holds
    the stored arrays of a weight, by suffix."""
    import torch

    return float(weight["input_scale"].max()) * torch.from_numpy(weight["scale"].copy()).float()


def _shares(input_scale: Array) -> Tensor:
    import torch

    scale = torch.from_numpy(input_scale.copy()).double()
    return scale / scale.max()


def _check_scales(what: str, scale: Array, smallest: float, largest: float) -> None:
    wrong = ~((scale >= smallest) & (scale <= largest))
    if wrong.any():
        where = int(wrong.argmax())
        bounds = f"it must be from {smallest:.3g} to {largest:.3g}"
        raise SchemeError(f"{what}, number {where} of {len(scale)}, is {scale[where]:.6g}; {bounds}")
