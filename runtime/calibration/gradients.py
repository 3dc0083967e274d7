"""Second moments of the gradients of a loss at the outputs of linears and of lookups."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.runtime.calibration.hessian import CHUNK_ROWS
from specc.runtime.errors import QuantizeError


@dataclass(frozen=True, slots=True)
class Gradients:
    """Second moments of the gradient of the loss l at the uses of a parameter of shape [rows, columns].

    Attributes:
        products: E[(dl/dy_i)^2] of the outputs y of linears with this weight, f64 [rows] or [experts, rows]; None if no
            linear uses it.
        lookups: E[1(id = v) (dl/dy_j)^2] per token, where y is a looked-up row, f64 [rows, columns]; None if the
            parameter is not looked up.
    """

    products: Tensor | None = None
    lookups: Tensor | None = None

    def cpu(self) -> "Gradients":
        """Returns a copy on the CPU."""
        products, lookups = (None if sums is None else sums.cpu() for sums in (self.products, self.lookups))
        return Gradients(products, lookups)


class Lookups:
    """Sums of (dl/dy)^2 over the lookups y = table[id], by row of the table.

    Memory: one f64 number per entry of the table, regardless of the number of lookups, and a chunk of 8,192 lookups.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._reads: dict[str, Tensor] = {}

    def add(self, name: str, rows: int, ids: Tensor, gradient: Tensor) -> None:
        """Adds the lookups of one call.

        The sums are computed on the CPU, where index_add_ has a fixed order. On a GPU its order varies, so that
        repeated runs would not be byte-identical.

        Args:
            name: the name of the table.
            rows: the number of rows of the table.
            ids: the indices that are looked up, [...], any integer dtype.
            gradient: the gradient of the loss by the result of the lookup, [..., columns], any float dtype.
        """
        places, row_gradients = ids.detach().flatten().long().cpu(), gradient.detach().flatten(0, -2).cpu()
        if name not in self._sums:
            self._sums[name] = torch.zeros(rows, row_gradients.shape[1], dtype=torch.float64)
            self._reads[name] = torch.zeros(rows, dtype=torch.int64)
        for start in range(0, len(places), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            self._sums[name].index_add_(0, places[part], row_gradients[part].double().square_())
        self._reads[name] += places.bincount(minlength=rows)

    def a_token(self, tokens: int) -> Mapping[str, Tensor]:
        """Returns E[1(id = v) (dl/dy_j)^2] per token by table name, f64 [rows v, columns j] on the CPU.

        `tokens` is the number of tokens that the model has processed. Lookups of the same token are summed, because
        their errors are assumed independent. Raises QuantizeError if a sum is NaN or infinite.
        """
        for name, total in self._sums.items():
            if not bool(total.isfinite().all()):
                raise QuantizeError(f"{name}: the gradient of its rows holds NaN or infinity", "calibrate otherwise")
        return {name: _with_unread(total, self._reads[name]) / tokens for name, total in self._sums.items()}


def _with_unread(total: Tensor, reads: Tensor) -> Tensor:
    """Returns the sums `total` [rows, columns] with an estimate for the rows that were never read.

    Later text reads rows that the calibration text missed, and errors of these rows add to the loss. The Good-Turing
    estimate predicts how often: leave out one lookup; its row is unread in the rest if and only if the row was read
    once. The total of the rows read once therefore estimates the total of all unread rows.

    Unread rows share this total evenly. The share of a row is at most the mean of the rows read once. If no row was
    read once, the unread rows share the mean over lookups, because an estimate of 0 would allow them any error. A
    uniform prior of half a read per row would overestimate rows that a language does not use: of a vocabulary of 257
    bytes, the 150 bytes that never occur in text would get 75 reads.

    The rows that were read are scaled down so that the sum is unchanged, but at most by half: a text that is so short
    that it reads nearly every row once is weak evidence about both groups.

    Args:
        total: the sums over lookups, f64 [rows, columns].
        reads: the number of lookups of each row, i64 [rows].
    """
    unread, once, count = reads == 0, reads == 1, int(reads.sum())
    missed, single = int(unread.sum()), int(once.sum())
    if not missed:
        return total
    each = total[once].sum(0) / max(missed, single) if single else total.sum(0) / count / missed
    whole = total.sum(0)
    share = (1 - missed * each / whole.clamp_min(torch.finfo(whole.dtype).tiny)).clamp_min(0.5)
    return torch.where(unread[:, None], each, total * share)
