"""A low-rank correction of a quantized matrix: W ~ codes * scale + L R (LQER, Zhang et al. 2024, arXiv 2402.02446).

L [rows, rank] is stored in 2 bits, -2 to 1, with one scale per column. R [rank, columns] is stored in 4 bits, -8 to 7,
with one scale per 64 columns of a row.
"""

from collections.abc import Mapping

from specc.compiler.ir.types import Tensor
from specc.compiler.quant.scheme import Array, SchemeError, Stored

GROUP = 64
LEFT, RIGHT = (-2, 1), (-8, 7)  # the smallest and the largest code
DAMPING = 0.01  # relative to the mean diagonal; added to the Hessian's diagonal before the factorization
SMALLEST_SCALE = 2.0**-24  # smallest positive float16


def stored(rows: int, columns: int, rank: int) -> tuple[Stored, ...]:
    groups = -(-columns // GROUP)
    return (
        Stored("left", "i8", (rows, rank)),
        Stored("left_scale", "f16", (rank,)),
        Stored("right", "i8", (rank, columns)),
        Stored("right_scale", "f16", (rank, groups)),
    )


def bits(rows: int, columns: int, rank: int) -> int:
    return rank * (2 * rows + 4 * columns + 16 + 16 * -(-columns // GROUP))


def correction(error: Tensor, rank: int, hessian: Tensor | None) -> dict[str, Array]:
    """Returns the arrays of the correction L R that minimizes the remaining error E - L R.

    With H = C C^T, the best L R of a given rank is the truncated singular value decomposition of E C, times C^-1. L is
    rounded first, then R is fitted to the rounded L. If the rounded correction does not reduce the error, all codes of
    the result are 0.

    Args:
        error: the error E of the codes, float64 [rows, columns].
        rank: the rank of the correction.
        hessian: X^T X of the inputs [columns, columns]. The function then minimizes the error of the outputs, tr(E H
            E^T) with H = `hessian`. If `hessian` is None, the function minimizes the Frobenius norm of the remaining
            error.

    Raises:
        SchemeError: if the damped Hessian is not positive definite.
    """
    import torch

    rows, columns = error.shape
    metric = damped = torch.eye(columns).to(error)
    if hessian is not None:
        scaled = hessian.to(error) / hessian.diagonal().mean().clamp(min=1e-300).to(error)
        metric = (scaled + scaled.T) / 2
        damped = metric + DAMPING * damped
    root, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        raise SchemeError("the Hessian is not positive definite; calibrate again")
    u, s, _ = torch.linalg.svd(error @ root, full_matrices=False)
    known = min(rank, s.numel())
    left = error.new_zeros(rows, rank)
    left[:, :known] = u[:, :known] * s[:known]
    # codes reach from -2 to 1, so the largest entry of a column is made negative
    left *= -left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    left_scale = _scale(left.abs().amax(0) / 1.5)
    codes = (left / left_scale.double()).round().clamp(*LEFT)
    # The best R for this L, in any metric of the outputs
    right = torch.linalg.pinv(codes * left_scale.double()) @ error
    grouped = torch.nn.functional.pad(right, (0, -columns % GROUP)).reshape(rank, -1, GROUP)
    right_scale = _scale(grouped.abs().amax(2) / 7.5)
    right_codes = (grouped / right_scale.double()[..., None]).round().clamp(*RIGHT).flatten(1)[:, :columns]
    arrays = {
        "left": codes.to(torch.int8).cpu().numpy(),
        "left_scale": left_scale.cpu().numpy(),
        "right": right_codes.to(torch.int8).contiguous().cpu().numpy(),
        "right_scale": right_scale.cpu().numpy(),
    }
    rest = error - product(arrays).to(error)
    if float((rest @ metric * rest).sum()) >= float((error @ metric * error).sum()):
        arrays["left"][:] = arrays["right"][:] = (
            0  # the scales are also constant, so that the arrays compress to almost nothing
        )
        arrays["left_scale"][:] = arrays["right_scale"][:] = SMALLEST_SCALE
    return arrays


def product(arrays: Mapping[str, Array]) -> Tensor:
    """Computes L R in float64 on the CPU, one rank at a time. The result therefore does not depend on the device.

    Raises SchemeError if the arrays cannot be a result of `correction`.
    """
    import torch

    left, right = (torch.from_numpy(arrays[name].copy()) for name in ("left", "right"))
    scales = [torch.from_numpy(arrays[name].copy()).double() for name in ("left_scale", "right_scale")]
    for codes, (least, most) in ((left, LEFT), (right, RIGHT)):
        if codes.numel() and (int(codes.min()) < least or int(codes.max()) > most):
            raise SchemeError(f"a code of the low-rank correction is outside [{least}, {most}]")
    if not all(bool((scale.isfinite() & (scale > 0)).all()) for scale in scales):
        raise SchemeError("a scale of the low-rank correction is not a positive number")
    columns = right.shape[1]
    exact = right.double() * scales[1].repeat_interleave(GROUP, 1)[:, :columns]
    total = torch.zeros(left.shape[0], columns, dtype=torch.float64)
    for r in range(left.shape[1]):
        total += (left[:, r].double() * scales[0][r])[:, None] * exact[r]
    return total


def _scale(exact: Tensor) -> Tensor:
    nearest = exact.clamp(min=SMALLEST_SCALE, max=65504.0).half()
    return nearest.clamp(min=SMALLEST_SCALE)
