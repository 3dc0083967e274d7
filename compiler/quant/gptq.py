"""GPTQ: rounds a matrix column by column. Each error is compensated in the remaining columns."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from specc.compiler.ir.types import Tensor
from specc.compiler.quant.entropy import normal_clip
from specc.compiler.quant.gptq_solver import Factor, factorize, row_groups, solve, weighted_error
from specc.compiler.quant.rows import PerRow, arrays_of, dequantized, row_quantile
from specc.compiler.quant.scheme import Array, SchemeError, Seen, Solution, check_weight
from specc.compiler.strict import Positive, PositiveFloat, later

Quantile = Annotated[float, Field(gt=0, le=1)]

# Maximum number of values in memory while solving, over all candidates. If there are more values, the rows are solved
# in several chunks.
CHUNK_VALUES = 2**24


class Gptq(PerRow):
    """Error-compensating rounding (Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative
    Pre-trained Transformers", arXiv 2210.17323).

    The codes of a row are computed once per clip, and also by rounding to nearest. The codes with the smallest
    Hessian-weighted error dw H dw^T are selected. A row therefore never has a larger error than with rounding to
    nearest.

    Attributes:
        damping: the number that is added to the Hessian's diagonal, as a fraction of the mean diagonal.
        order: the order in which columns are rounded: by descending diagonal or in natural order.
        block: the number of columns that are rounded before the error is propagated to the other columns. The number
            affects the speed. The number affects codes only through rounding errors in float64.
        clip_quantiles: the clips, as quantiles of the magnitudes in a row.
        clip_stds: the clips as multiples of the row's standard deviation about 0 ("SDClip" of parameter-golf PR 1394).
            These clips replace the quantiles. For rounding to nearest, these clips replace the maximum of the row. Such
            clips give a larger error, but smaller codes, which compress to fewer bytes.
    """

    scheme: Literal["gptq"] = "gptq"
    bits: Annotated[int, Field(ge=4, le=8)]
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    order: Literal["descending", "natural"] = "descending"
    block: Positive = 128
    clip_quantiles: Annotated[tuple[Quantile, ...], Field(min_length=1, max_length=16)] = (
        0.999,
        0.9995,
        0.9999,
        0.99999,
        1.0,
    )
    clip_stds: Annotated[tuple[PositiveFloat, ...], Field(max_length=16)] = later(())

    needs_hessian: ClassVar[bool] = True

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) not in (2, 3):
            return f"`scheme: gptq` needs a matrix, or one matrix per expert, but the shape is {list(shape)}"
        return super().rejects(shape)

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        return self.quantize_seen(weight, Seen(hessian))

    def quantize_seen(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """Quantizes `weight` with the calibration data `seen`. The Hessian `seen.hessian` [columns, columns] must be
        symmetric and positive semidefinite.

        If several products or lookups read the parameter, `row_groups` divides its rows into groups, each with a matrix
        that takes the place of the Hessian. If the parameter contains the matrices of several experts, [experts, rows,
        columns], `seen.hessian` contains one Hessian per expert. Each of these Hessians was measured on the inputs of
        its expert.

        Raises SchemeError if the scheme rejects the shape, if the weight contains NaN or infinity, or if a value is out
        of range. Also raises SchemeError if the Hessian is missing, has the wrong shape, contains NaN or infinity, or
        is not positive definite with the largest damping.
        """
        shape = tuple(weight.shape)
        check_weight(self, weight)
        if seen.uses:
            return self._of_groups(weight, seen)
        if seen.hessian is None:
            raise SchemeError("gptq needs the Hessian of the input, which was not measured; calibrate again")
        if (have := list(seen.hessian.shape)) != (want := [*shape[:-2], shape[-1], shape[-1]]):
            raise SchemeError(f"the Hessian has the shape {have}, not {want}; calibrate again")
        if len(shape) == 3:
            return self._of_experts(weight, seen)
        factor = factorize(seen.hessian.to(weight.device).double(), self.damping, self.order)
        seen.solved(factor.solution)
        return self.mended(arrays_of(*self._solved(weight, factor), shape), weight, factor.hessian)

    def _of_groups(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        import torch

        solutions: list[Solution] = []
        codes = torch.empty(weight.shape, dtype=torch.float64, device=weight.device)
        scales = torch.empty(weight.shape[0], dtype=torch.float16, device=weight.device)
        for rows, metric in row_groups(seen.uses):
            factor = factorize(metric.to(weight.device).double(), self.damping, self.order)
            solutions.append(factor.solution)
            rows = rows.to(weight.device)
            codes[rows], scales[rows] = self._solved(weight[rows], factor)
        damping = max(solution.damping for solution in solutions)
        seen.solved(Solution(self.damping, damping, max(solution.dead for solution in solutions)))
        mean = torch.stack([use.rows.mean() * use.columns for use in seen.uses]).sum(0)
        return self.mended(arrays_of(codes, scales, tuple(weight.shape)), weight, mean)

    def _solved(self, weight: Tensor, factor: Factor) -> tuple[Tensor, Tensor]:
        import torch

        candidates = len(self.clip_stds or self.clip_quantiles)
        step = max(1, CHUNK_VALUES // (weight.shape[1] * (candidates + 1)))
        starts = range(0, weight.shape[0], step)
        parts = [self._rows(weight[start : start + step].detach().double(), factor) for start in starts]
        return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])

    def _of_experts(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """Quantizes the matrix of each expert in `weight` [experts, rows, columns]. If an expert had no inputs, its
        matrix is rounded to nearest."""
        import numpy as np

        assert seen.hessian is not None
        solutions: list[Solution] = []
        arrays = [
            self.quantize_seen(matrix, Seen(hessian, solved=solutions.append))
            for matrix, hessian in zip(weight, seen.hessian, strict=True)
        ]
        damping = max(solution.damping for solution in solutions)
        seen.solved(Solution(self.damping, damping, sum(solution.dead for solution in solutions)))
        return {suffix: np.stack([entry[suffix] for entry in arrays]) for suffix in arrays[0]}

    def with_clip(self, deviations: float) -> Self:
        return self.model_copy(update={"clip_stds": (deviations,)})

    def normal_clip(self, columns: int) -> float:
        return min(self.clip_stds) if self.clip_stds else normal_clip(columns, min(self.clip_quantiles))

    def clip_without_data(self, rows: Tensor) -> Tensor:
        if self.clip_stds:
            return self.clip_stds[0] * _deviation(rows)
        magnitude, widest = rows.abs(), max(self.clip_quantiles)
        return magnitude.amax(1) if widest == 1.0 else row_quantile(magnitude.sort(1).values, widest)

    def _clips(self, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        if self.clip_stds:
            clips = [factor * _deviation(weight) for factor in self.clip_stds]
            return clips, clips
        magnitude = weight.abs().sort(1).values
        return [magnitude[:, -1]], [row_quantile(magnitude, quantile) for quantile in self.clip_quantiles]

    def _rows(self, weight: Tensor, factor: Factor) -> tuple[Tensor, Tensor]:
        import torch

        nearest, solved = ([self.scales(clip) for clip in clips] for clips in self._clips(weight))
        scales = [*nearest, *solved]
        # The candidates are stacked as rows, so that the sequential loop over columns runs only once.
        repeated = weight.repeat(len(solved), 1)
        solution = solve(repeated, torch.cat(solved).double(), factor, self.top, self.block)
        codes = [*(self.nearest(weight, scale) for scale in nearest), *solution.chunk(len(solved))]
        errors = [
            weighted_error(weight - dequantized(q, s).double(), factor.hessian)
            for q, s in zip(codes, scales, strict=True)
        ]
        # Rounding to nearest is the first candidate, so that argmin selects it in a tie.
        best = torch.stack(errors).argmin(0)
        each = torch.arange(weight.shape[0], device=weight.device)
        return torch.stack(codes)[best, each], torch.stack(scales)[best, each]


def _deviation(rows: Tensor) -> Tensor:
    """Returns the root mean square of each row: the deviation about 0, which is also positive for constant rows."""
    return rows.square().mean(1).sqrt()
