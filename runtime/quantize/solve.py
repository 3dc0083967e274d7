"""Bits for each parameter under a byte budget, as an optimization: the least loss that fits.

Of every parameter it is known what each width would cost: bytes, by really quantizing and measuring, and nats a
token, by the second-order estimate below. To choose one width each is a multiple-choice knapsack, solved by dynamic
programming over bytes.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specc.compiler.pattern import matches
from specc.compiler.quant.scheme import Scheme
from specc.compiler.quant.variants import variants
from specc.compiler.spec.spec import Allocate
from specc.runtime.calibration.gradients import Gradients
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.allocate import Measure, too_large

CELLS = 2**16  # bytes are counted in this many parts of the budget
ROUNDS = 8  # exact sizes that are measured at most: each compresses everything
ENOUGH = 0.0005  # of the budget left over, and no more is looked for

Allocation = Mapping[str, Scheme]
Option = tuple[int, float]  # bytes, cost


def added_nats(delta: Tensor, hessian: Tensor | None, gradients: Gradients) -> float:
    """What an error `delta` [rows, columns] of a parameter adds to the loss, in nats a token, to second order: the sum
    of what it adds where the parameter is multiplied, and where it is looked up. A tied table is both.

    Of products 1/2 sum_i g_i dw_i H dw_i^T, with H = `hessian` [columns, columns] = E[x x^T] of the inputs, summed over
    the calls that a token makes, and g = `gradients.products`. That is the Fisher information with inputs and gradients
    taken as independent and outputs as uncorrelated (Martens and Grosse 2015, "K-FAC", kept to its diagonal on the side
    of the outputs). Of a weight with several calls a token, g also holds how much these have in common. Of lookups, the
    diagonal of the Fisher information: 1/2 sum_vj f_vj dw_vj^2 with f = `gradients.lookups`.

    Raises ValueError for products without a Hessian.
    """
    exact, total = delta.double(), 0.0
    if gradients.products is not None:
        if hessian is None:
            raise ValueError("the error of a product needs its Hessian")
        curved = ((exact @ hessian.double()) * exact).sum(1).clamp_(min=0.0)
        total += 0.5 * float(curved @ gradients.products.double())
    if gradients.lookups is not None:
        total += 0.5 * float((exact.square() * gradients.lookups.double()).sum())
    return total


def knapsack(options: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...] | None:
    """Which option of each item makes the sum of costs least while the bytes stay within `budget`; None where even
    the smallest options exceed it.

    Exact up to the size of a cell, budget / 65536: bytes are rounded up to whole ones, never down. Of equal costs the
    smaller bytes win, then the earlier option.
    """
    smallest = sum(min(size for size, _ in item) for item in options)
    if smallest > budget:
        return None
    cell = max(1, -(-budget // CELLS))
    room = budget // cell
    sizes = [[-(-size // cell) for size, _ in item] for item in options]
    if sum(map(min, sizes)) > room:  # only because of the rounding
        return tuple(min(range(len(item)), key=lambda i: item[i]) for item in options)
    best = np.zeros(room + 1)
    taken = np.zeros((len(options), room + 1), dtype=np.int16)
    for n, item in enumerate(options):
        found = np.full(room + 1, np.inf)
        for i in sorted(range(len(item)), key=lambda i: (sizes[n][i], i)):
            size = sizes[n][i]
            if size > room:
                continue
            with_it = np.full(room + 1, np.inf)
            with_it[size:] = best[: room + 1 - size] + item[i][1]
            better = with_it < found
            found[better], taken[n, better] = with_it[better], i
        best = found
    place = int(np.argmin(best))
    chosen: list[int] = []
    for n in reversed(range(len(options))):
        chosen.append(int(taken[n, place]))
        place -= sizes[n][chosen[-1]]
    return tuple(reversed(chosen))


def solve_bits(
    wish: Allocate,
    budget: int,
    base: Allocation,
    cost: Callable[[str, Scheme], float | None],
    estimate: Callable[[str, Scheme], int],
    exact: Measure,
    say: Callable[[str], None],
    code: int = 0,
) -> dict[str, Scheme]:
    """`base` with the widths of `wish.bits` that cost least within `budget` bytes.

    Parameters that `wish.match` covers are chosen for, where their scheme can have other widths and `cost` (nats a
    token) knows them; others keep their scheme. `estimate` gives about the bytes of one parameter; how far all of them
    together are off is found by `exact`, the bytes of the whole artifact, which decides. `code` are the bytes that the
    budget was lowered by, for what is said of it.

    Raises QuantizeError when nothing fits, or nothing can be chosen for.
    """
    choices = {name: options for name in base if len(options := _widths(name, base[name], wish, cost)) > 1}
    if not choices:
        raise QuantizeError(
            f"allocate: no parameter that {wish.match!r} covers can have several of the widths {list(wish.bits)}",
            "widen quant.allocate.match, or give them a scheme with a width",
        )
    names = list(choices)
    sized = [[(estimate(name, scheme), nats) for scheme, nats in choices[name]] for name in names]

    def schemes(picks: tuple[int, ...]) -> dict[str, Scheme]:
        picked = {name: choices[name][i][0] for name, i in zip(names, picks, strict=True)}
        return {name: picked.get(name, scheme) for name, scheme in base.items()}

    def estimated(picks: tuple[int, ...]) -> int:
        return sum(item[i][0] for item, i in zip(sized, picks, strict=True))

    def nats(picks: tuple[int, ...]) -> float:
        return sum(item[i][1] for item, i in zip(sized, picks, strict=True))

    smallest = tuple(min(range(len(item)), key=lambda i: item[i][0]) for item in sized)
    tried: dict[tuple[int, ...], int] = {smallest: exact(schemes(smallest))}
    if tried[smallest] > budget:
        hint = "allow fewer bits or wider clips under quant.allocate, or a larger quant.budget_bytes"
        raise too_large(tried[smallest], "with the fewest bits", budget, code, hint)
    low, high = estimated(smallest), None  # what may be taken by estimate: it fits, it does not
    target = low + budget - tried[smallest]
    for _ in range(4 * ROUNDS):
        picks = knapsack(sized, target)
        if picks is None or (picks not in tried and len(tried) > ROUNDS):
            break
        if picks not in tried:
            tried[picks] = exact(schemes(picks))
            say(f"allocate: {tried[picks]:,} of {budget:,} bytes, {nats(picks):.5f} nats a token by estimate")
        left = budget - tried[picks]
        if 0 <= left < budget * ENOUGH:
            break
        low, high = (max(low, target), high) if left >= 0 else (low, target)
        wanted = estimated(picks) + left  # the estimate, moved to be right for what was measured last
        if (high is None and wanted <= target) or (high is not None and high - low <= 1):
            break
        target = wanted if high is None or low < wanted < high else (low + high) // 2
    fitting = [one for one, size in tried.items() if size <= budget]
    return schemes(min(fitting, key=lambda one: (nats(one), tried[one])))


def _widths(
    name: str, scheme: Scheme, wish: Allocate, cost: Callable[[str, Scheme], float | None]
) -> list[tuple[Scheme, float]]:
    """The schemes that a parameter may have, each with what it costs; empty where there is no choice."""
    if not matches(wish.match, name):
        return []
    found: list[tuple[Scheme, float]] = []
    for other in variants(scheme, wish.bits, wish.clip_stds):
        nats = cost(name, other)
        if nats is not None:
            found.append((other, nats))
    return found


def largest_errors(names: Sequence[str], errors: Callable[[str], Tensor], count: int) -> tuple[str, ...]:
    """The `count` of `names` whose errors have the largest Frobenius norm, equals by name."""
    norms = {name: float(torch.linalg.vector_norm(errors(name).double())) for name in names}
    return tuple(sorted(names, key=lambda name: (-norms[name], name))[:count])
