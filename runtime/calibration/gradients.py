"""Second moments of the gradients of a loss: at the outputs of linears, and at the rows that lookups read."""

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
        products: E[(dl/dy_i)^2] of the outputs y of linears whose weight it is, f64 [rows]; None where it is none's.
        lookups: E[1(id = v) (dl/dy_j)^2] of the rows y that are looked up in it, a token, f64 [rows, columns]; None
            where none are.
    """

    products: Tensor | None = None
    lookups: Tensor | None = None

    def cpu(self) -> "Gradients":
        """The same on the CPU."""
        products, lookups = (None if one is None else one.cpu() for one in (self.products, self.lookups))
        return Gradients(products, lookups)


class Lookups:
    """Sums of (dl/dy)^2 of lookups y = table[id], by row of the table. Memory: a float64 number an entry, however much
    is read, and a chunk of 8,192 lookups."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._reads: dict[str, Tensor] = {}

    def add(self, name: str, rows: int, ids: Tensor, gradient: Tensor) -> None:
        """Adds lookups of `ids` [...], any integer dtype, in a table of `rows` rows, where the loss has the `gradient`
        [..., columns] by what they gave, any float dtype.

        On the CPU, where index_add_ adds in one order: on a GPU it does not, and the same run gives the same bytes.
        """
        places, found = ids.detach().flatten().long().cpu(), gradient.detach().flatten(0, -2).cpu()
        if name not in self._sums:
            self._sums[name] = torch.zeros(rows, found.shape[1], dtype=torch.float64)
            self._reads[name] = torch.zeros(rows, dtype=torch.int64)
        for start in range(0, len(places), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            self._sums[name].index_add_(0, places[part], found[part].double().square_())
        self._reads[name] += places.bincount(minlength=rows)

    def a_token(self, tokens: int) -> Mapping[str, Tensor]:
        """E[1(id = v) (dl/dy_j)^2] by table, f64 [rows v, columns j] on the CPU, where `tokens` went through the model:
        a sum over the lookups that each of them makes, whose errors are taken as independent.

        Raises QuantizeError for NaN or infinity.
        """
        for name, total in self._sums.items():
            if not bool(total.isfinite().all()):
                raise QuantizeError(f"{name}: the gradient of its rows holds NaN or infinity", "calibrate otherwise")
        return {name: _with_unread(total, self._reads[name]) / tokens for name, total in self._sums.items()}


def _with_unread(total: Tensor, reads: Tensor) -> Tensor:
    """The sums `total` [rows, columns] over `reads` [rows], with an estimate for the rows that were never read.

    Text goes on to read rows that calibration missed, and their errors count then. How often, Good and Turing's
    estimate tells: leave out one lookup, and it is of a row that the others do not read just where its row was read
    once. So what the rows read once cost is what all unread ones cost together. They share it evenly, none more than a
    row read once; where no row was read once they share one lookup of the mean gradient, as the estimate of 0 would let
    such rows be stored as anything. An even prior over all rows (half a read each) says far too much of vocabularies
    that a language uses little of: of 257 bytes it gives the 150 that no text holds 75 reads. The rows that were read
    give up as much, so that the sum stays what was measured, but no more than half: a text so short that it reads
    nearly every row once tells little of either.
    """
    unread, once, count = reads == 0, reads == 1, int(reads.sum())
    missed, single = int(unread.sum()), int(once.sum())
    if not missed:
        return total
    each = total[once].sum(0) / max(missed, single) if single else total.sum(0) / count / missed
    whole = total.sum(0)
    kept = (1 - missed * each / whole.clamp_min(torch.finfo(whole.dtype).tiny)).clamp_min(0.5)
    return torch.where(unread[:, None], each, total * kept)
