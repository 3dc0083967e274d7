"""The linear algebra of GPTQ, in float64.

Let H^-1 = U^T U with U upper triangular. Columns are rounded from left to right. The error of column j, e = (w_j -
q_j) / U_jj, changes each later column k by -e U_jk (Frantar et al. 2022, step 3). One factorization gives U: Cholesky
of H with reversed columns yields H = R R^T with R upper triangular, and U = R^-1.
"""

from collections.abc import Sequence
from typing import Literal

from specc.compiler.ir.types import Tensor
from specc.compiler.quant.scheme import SchemeError, Solution, Use
from specc.compiler.records import record

TINY = 1e-300
SMALLEST_SHARE = 10  # weights below 2^-10 of the largest weight count as 2^-10 of the largest weight
# Relative to the mean diagonal; with more damping, the solution is practically rounding to nearest
LARGEST_DAMPING = 10.0


@record
class Factor:
    """A factorized Hessian.

    Attributes:
        hessian: the undamped Hessian [n, n], scaled to a mean diagonal of 1 over columns with input.
        upper: the matrix U [n, n] for the columns in `order`.
        order: i64[n], the order in which columns are rounded.
        solution: the applied damping, and the number of columns without input.
    """

    hessian: Tensor
    upper: Tensor
    order: Tensor
    solution: Solution


def row_groups(uses: Sequence[Use]) -> list[tuple[Tensor, Tensor]]:
    """Divides the rows of a parameter into groups. The metrics of the rows in a group are nearly proportional.

    The metric of row i is the matrix sum_u rows_ui columns_u over the uses u. This metric takes the place of the
    Hessian. GPTQ factorizes one metric per group. To form the groups, the weights rows_ui of each row are divided by
    the largest weight of the row. The quotients are rounded to powers of 2, with a minimum of 2^-10. Rows with equal
    rounded quotients form a group. With two uses, there are at most 21 groups.

    Args:
        uses: At least one use.

    Returns:
        For each group, the indices of its rows, i64 [rows], and its metric, float64 [n, n].
    """
    import torch

    columns = [use.columns.double() / use.columns.diagonal().mean().clamp(min=TINY) for use in uses]
    weights = torch.stack([use.rows.double() * use.columns.diagonal().mean() for use in uses])
    shares = weights / weights.amax(0).clamp(min=TINY)
    steps = shares.log2().clamp(min=-SMALLEST_SHARE).round()
    kinds, group = torch.unique(steps, dim=1, return_inverse=True)
    metrics = torch.einsum("ug,ukl->gkl", kinds.exp2(), torch.stack(columns))
    return [((group == number).nonzero()[:, 0], metric) for number, metric in enumerate(metrics)]


def factorize(hessian: Tensor, damping: float, order: Literal["descending", "natural"]) -> Factor:
    """Factorizes `hessian` [n, n], float64, symmetric positive semidefinite.

    Columns without input (a zero on the diagonal) are decoupled, so they are rounded to nearest. If the Cholesky
    factorization fails, the damping is multiplied by 10, up to 10 times the mean diagonal.

    Raises SchemeError if Cholesky fails with the largest damping, or if the Hessian is not finite or has a negative
    diagonal.
    """
    import torch

    if not bool(hessian.isfinite().all()):
        raise SchemeError("the Hessian holds NaN or infinity")
    requested, diagonal = damping, hessian.diagonal()
    if float(diagonal.min()) < 0:
        raise SchemeError("the Hessian has a negative diagonal, so it is not X^T X of any input")
    dead = diagonal == 0
    # The Hessian is divided by its largest entry first, because a sum of diagonal entries near the maximum of float64
    # would overflow.
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
                return Factor(scaled, inverse, by, Solution(requested, damping, int(dead.sum())))
        if damping * 10 > LARGEST_DAMPING:
            amount = f"damped by {damping:g} times its mean diagonal"
            raise SchemeError(f"the Hessian is not positive definite, even {amount}; calibrate again")
        damping *= 10


def solve(weight: Tensor, scale: Tensor, factor: Factor, top: int, block: int) -> Tensor:
    """Returns the codes of `weight`, as whole numbers in float64 [rows, n].

    Columns are rounded in the order of `factor`, in blocks. The error of a column changes the later columns of the
    block immediately. One matrix product at the end of the block changes the columns after the block.

    Args:
        weight: float64 [rows, n].
        scale: The row scales, float64 [rows].
        factor: The factorized Hessian.
        top: The largest code. The smallest is -top.
        block: The number of columns per block.
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
    """Returns dw H dw^T for each row dw of `delta` [rows, n], in float64. A result that would be negative by rounding
    is 0."""
    return (delta @ hessian).mul_(delta).sum(1).clamp_(min=0.0)
