"""Estimates how much an error of a parameter increases the loss, from the uses of the parameter in the model: matrix
products, and lookups of rows.

Let d be an error that is added to a parameter W [N, K], and let g be the gradient of the loss L of one token. The loss
then increases by 1/2 E[(d . g)^2] per token. F = E[g g^T] is the Fisher information. The gradient g is a sum over the
uses of W. Every use adds matrices l r^T of rank one to g, where l [N] has one entry per row of W:

- a product y = W x adds one matrix with l = dL/dy, r = x for each row of the input x;
- a lookup y = W[v] adds one matrix with l = one-hot(v), r = dL/dy.

Let F_u be the sum of (l r^T)(l r^T)^T over all terms of one kind of use, u. As in K-FAC (Martens and Grosse 2015), the
terms are assumed to be uncorrelated, so that F = sum_u F_u. Each F_u is approximated by the Kronecker product of its
partial traces, A_u B_u^T / tr F_u:

    A_u = diag(sum |r|^2 l_i^2) [N],  B_u = sum |l|^2 r r^T [K, K],  sum_i A_ui = tr B_u = tr F_u

The loss then increases by 1/2 sum_i d_i M_i d_i^T. The metric of row i is M_i = sum_u A_ui / tr(B_u) B_u [K, K]. For a
single product, the metric is E[x x^T] up to a factor per row, which GPTQ does not need. A tied embedding table has two
uses: the product of the head with hidden states, and the lookups.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from specc.compiler.quant.scheme import Use
from specc.runtime.calibration.calibrate import Capture
from specc.runtime.calibration.hessian import Hessians
from specc.runtime.errors import QuantizeError

Windows = Iterator[tuple[Tensor, Tensor]]


def signed_sum(nats: Tensor, generator: torch.Generator) -> Tensor:
    """Multiplies each of the losses `nats` [rows, window] by a random sign, and returns the sum.

    Let g_n be the gradient of the loss of token n. One backward pass cannot compute each g_n separately. However, the
    expectation of the squared gradient of the returned sum is sum_n g_n^2: the products of gradients of different
    tokens have random signs, so that their expectation is 0.
    """
    signs = torch.randint(0, 2, nats.shape, generator=generator, dtype=torch.int8).to(nats.device)
    return (nats * (2 * signs - 1)).sum()


def capture_uses(
    model: nn.Module,
    names: Collection[str],
    windows: Windows,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> Mapping[str, tuple[Use, ...]]:
    """Runs the model on calibration text, and measures the uses of parameters.

    A use has the factors A / tr(B) and B, averaged over tokens. The docstring of this module defines A and B.

    Args:
        model: the model, generated without fusions, on `device`.
        names: the names of the parameters [N, K] to measure.
        windows: batches (ids, targets), i64 [rows, window] each.
        device: the device of the model and of the result.
        progress: called after each batch with the number of rows processed so far.

    Returns:
        For each name, at most two uses: all matrix products with the parameter, and all lookups in the parameter.

    Raises:
        QuantizeError: if a gradient or an input contains NaN or infinity.
    """
    products, lookups = _Terms(device), _Terms(device)
    inputs: list[tuple[str, Tensor]] = []
    outputs: list[Tensor] = []
    looked: list[tuple[str, Tensor, Tensor]] = []

    def multiplied(name: str, value: Tensor, ends: Tensor | None) -> None:
        if name in names:
            outputs.append(value)

    capture = Capture(
        model,
        lambda name, value, ends: inputs.append((name, value.detach())) if name in names else None,
        multiplied,
        lambda name, ids, value: looked.append((name, ids, value)) if name in names else None,
    )
    generator = torch.Generator().manual_seed(0)
    done = tokens = 0
    for ids, targets in windows:
        for seen in (inputs, outputs, looked):
            seen.clear()
        with torch.enable_grad():
            total = signed_sum(capture.run(ids.to(device), targets.to(device)), generator)
        gradients = torch.autograd.grad(total, [*outputs, *(value for *_, value in looked)])
        for (name, x), gradient in zip(inputs, gradients[: len(inputs)], strict=True):
            products.add(name, gradient, x)
        for (name, places, _), gradient in zip(looked, gradients[len(inputs) :], strict=True):
            lookups.look_up(name, len(model.get_parameter(name)), places, gradient)
        done += ids.shape[0]
        tokens += ids.numel()
        if progress is not None:
            progress(done)
    kinds = (products.per_token(tokens), lookups.per_token(tokens))
    return {name: tuple(kind[name] for kind in kinds if name in kind) for name in names}


class _Terms:
    """Accumulates the partial traces A and B of the rank-one terms l r^T, by parameter name. The docstring of the
    module defines A, B, l and r.
    """

    def __init__(self, device: torch.device) -> None:
        self._columns = Hessians(device=device)
        self._rows: dict[str, Tensor] = {}
        self._reads: dict[str, Tensor] = {}

    def add(self, name: str, left: Tensor, right: Tensor) -> None:
        squares, right = left.detach().flatten(0, -2).double().square(), right.flatten(0, -2).double()
        self._columns.add(name, right * squares.sum(1, keepdim=True).sqrt())
        rows = (squares * right.square().sum(1, keepdim=True)).sum(0)
        self._rows[name] = self._rows[name] + rows if name in self._rows else rows

    def look_up(self, name: str, rows: int, ids: Tensor, gradient: Tensor) -> None:
        """Adds the lookups of the rows `ids` [...] in the parameter `name`, a table with `rows` rows.

        `gradient` [..., K] has the gradients of the looked-up rows. The sums for each row are computed on the CPU,
        because `index_add_` on a GPU adds in a varying order, and the results would not be reproducible.
        """
        places, right = ids.detach().flatten().long().cpu(), gradient.detach().flatten(0, -2).double()
        self._columns.add(name, right)
        total = self._rows.setdefault(name, torch.zeros(rows, dtype=torch.float64))
        total.index_add_(0, places, right.square().sum(1).cpu())
        reads = self._reads.setdefault(name, torch.zeros(rows, dtype=torch.int64))
        reads += places.bincount(minlength=rows)

    def per_token(self, tokens: int) -> Mapping[str, Use]:
        uses = {}
        for name, columns in self._columns.per_token(tokens).items():
            rows = self._rows[name]
            rows = with_unread(rows, self._reads[name]) if name in self._reads else rows
            if not bool(rows.isfinite().all()):
                raise QuantizeError(
                    f"{name}: the gradient contains NaN or infinity", "calibrate from an earlier checkpoint"
                )
            uses[name] = Use(rows.to(columns.device) / rows.sum().clamp(min=torch.finfo(rows.dtype).tiny), columns)
        return uses


def with_unread(total: Tensor, reads: Tensor) -> Tensor:
    """Adds estimates for the rows of a table that were never looked up. Returns the new sum of each row.

    Later text may read rows that the calibration text does not read. By the Good-Turing estimate, the sum over all rows
    that were read once predicts the sum over all unread rows.

    The predicted sum is divided evenly among the unread rows. The estimate for one unread row is at most the mean over
    the rows that were read once. If no row was read once, the unread rows together receive the mean over all lookups.
    An estimate of 0 would permit any error in these rows.

    The sums of the rows that were read are then scaled down, so that the total over all rows stays the same. The scale
    factor is at least 1/2.

    Args:
        total: the sum over the lookups of each row, f64 [rows].
        reads: the number of lookups of each row, i64 [rows].
    """
    unread, once, count = reads == 0, reads == 1, int(reads.sum())
    missed, single = int(unread.sum()), int(once.sum())
    if not missed:
        return total
    each = total[once].sum() / max(missed, single) if single else total.sum() / count / missed
    whole = total.sum().clamp_min(torch.finfo(total.dtype).tiny)
    share = (1 - missed * each / whole).clamp_min(0.5)
    return torch.where(unread, each, total * share)
