"""The linear algebra of GPTQ, in float64.

With H^-1 = U^T U, U upper triangular, rounding columns from left to right needs only the rows of U: the error
of column j, e = (w_j - q_j) / U_jj, moves each later column k by -e U_jk (Frantar et al. 2022, step 3). Here
U comes from one factorization: with the order of columns reversed, Cholesky gives H = R R^T with R upper
triangular, and U = R^-1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specc.compiler.quant.scheme import SchemeError, Solution

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_DAMPING = 10.0  # in mean diagonals; beyond it the solution is rounding to nearest in all but name


@dataclass(frozen=True, slots=True)
class Factor:
    """`hessian` undamped, scaled to a mean diagonal of 1; `upper` is U for the columns in `order`; what it took."""

    hessian: Tensor
    upper: Tensor
    order: Tensor
    solution: Solution


def factorize(hessian: Tensor, damping: float, order: Literal["descending", "natural"]) -> Factor:
    """The factor of `hessian` [n, n] float64, symmetric positive semidefinite.

    Columns without input (a zero on the diagonal) are decoupled: they are rounded to nearest. Where Cholesky
    fails, the damping grows tenfold, up to 10 mean diagonals; then SchemeError is raised.
    """
    import torch

    if not bool(hessian.isfinite().all()):
        raise SchemeError("its Hessian holds NaN or infinity")
    asked, diagonal = damping, hessian.diagonal()
    if float(diagonal.min()) < 0:
        raise SchemeError("its Hessian has a negative diagonal, so it is not X^T X of any input")
    dead = diagonal == 0
    # Divided by the largest entry first: a sum of diagonals near the end of float64 would overflow.
    largest = torch.where(hessian.abs().max() > 0, hessian.abs().max(), torch.ones_like(diagonal[0]))
    scaled = hessian / largest
    live = scaled.diagonal()[~dead]
    scaled = scaled / live.mean() if live.numel() else scaled
    scaled = (scaled + scaled.T) / 2
    coupled = scaled.masked_fill(dead[:, None] | dead[None, :], 0.0)
    coupled.diagonal()[dead] = 1.0

    by = torch.arange(dead.numel(), device=hessian.device)
    if order == "descending":
        by = coupled.diagonal().argsort(descending=True, stable=True)
    ordered = coupled[by][:, by]
    while True:
        damped = ordered.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not bool(failed):
            upper = lower.flip(0, 1)
            inverse = torch.linalg.solve_triangular(upper, torch.eye(len(dead)).to(upper), upper=True)
            if bool(inverse.isfinite().all()):
                return Factor(scaled, inverse, by, Solution(asked, damping, int(dead.sum())))
        if damping * 10 > LARGEST_DAMPING:
            raise SchemeError(
                f"its Hessian is not positive definite with {damping:g} mean diagonals added; calibrate again"
            )
        damping *= 10


def solve(weight: Tensor, scale: Tensor, factor: Factor, top: int, block: int) -> Tensor:
    """The codes (whole numbers in float64) of `weight` [rows, n] under the row scales `scale` [rows].

    Columns go in the order of `factor`, `block` at a time: within a block the error moves the block's own
    later columns at once, and the columns after it in one product at its end.
    """
    import torch

    remaining = weight[:, factor.order]
    codes = torch.empty_like(remaining)
    n = remaining.shape[1]
    for start in range(0, n, block):
        stop = min(start + block, n)
        here = remaining[:, start:stop]
        upper = factor.upper[start:stop, start:stop]
        errors = torch.empty_like(here)
        for j in range(stop - start):
            code = (here[:, j] / scale).round_().clamp_(-top, top)
            error = (here[:, j] - code * scale) / upper[j, j]
            here[:, j + 1 :].addr_(error, upper[j, j + 1 :], alpha=-1.0)
            codes[:, start + j] = code
            errors[:, j] = error
        remaining[:, stop:].addmm_(errors, factor.upper[start:stop, stop:], alpha=-1.0)
    return codes[:, factor.order.argsort()]


def weighted_error(delta: Tensor, hessian: Tensor) -> Tensor:
    """dw H dw^T of each row of `delta` [rows, n], float64, never below 0."""
    return (delta @ hessian).mul_(delta).sum(1).clamp_(min=0.0)
