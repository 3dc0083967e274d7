"""Bit allocation under a byte budget: chooses the bits of each parameter so that the loss increases least.

Each number of bits gives a parameter a size in bytes and a cost in nats per token. The size is measured by quantizing
the parameter. runtime/calibration/added_nats.py estimates the cost. The choice is a multiple-choice knapsack problem,
which dynamic programming over bytes solves.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specc.compiler.pattern import matches
from specc.compiler.quant.scheme import Scheme, variants
from specc.compiler.spec.spec import Allocate
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.promotion import Allocation, Measure, too_large

CELLS = 2**16  # the dynamic program counts bytes in units of budget / CELLS
ROUNDS = 8  # the maximum number of exact measurements, each of which compresses all arrays
ENOUGH = 0.0005  # the search ends when less than this fraction of the budget is unused

Option = tuple[int, float]  # bytes, cost
Costs = Callable[[Mapping[str, Sequence[Scheme]]], Mapping[str, Sequence[float]]]


def knapsack(options: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...] | None:
    """Chooses one option per item, so that the total cost is minimal within `budget` bytes.

    An option is a pair of a size in bytes and a cost. The function rounds sizes up to multiples of budget / 65536
    bytes. The result is optimal up to this rounding. Among options of equal cost, the function prefers the smallest
    option. Among options of equal cost and size, the function prefers the option with the lowest index.

    Returns:
        The index of the chosen option of each item. None if even the smallest options together exceed the budget.
    """
    smallest = sum(min(size for size, _ in item) for item in options)
    if smallest > budget:
        return None
    cell = max(1, -(-budget // CELLS))
    room = budget // cell
    sizes = [[-(-size // cell) for size, _ in item] for item in options]
    if sum(map(min, sizes)) > room:  # the smallest options fit only without rounding up their sizes
        return tuple(min(range(len(item)), key=lambda i: item[i]) for item in options)
    best = np.zeros(room + 1)
    picks = np.zeros((len(options), room + 1), dtype=np.int16)
    for n, item in enumerate(options):
        least = np.full(room + 1, np.inf)
        for i in sorted(range(len(item)), key=lambda i: (sizes[n][i], i)):
            size = sizes[n][i]
            if size > room:
                continue
            total = np.full(room + 1, np.inf)
            total[size:] = best[: room + 1 - size] + item[i][1]
            better = total < least
            least[better], picks[n, better] = total[better], i
        best = least
    place = int(np.argmin(best))
    chosen: list[int] = []
    for n in reversed(range(len(options))):
        chosen.append(int(picks[n, place]))
        place -= sizes[n][chosen[-1]]
    return tuple(reversed(chosen))


def allocate_bits(
    allocate: Allocate,
    budget: int,
    base: Allocation,
    costs: Costs,
    estimate: Callable[[str, Scheme], int],
    exact: Measure,
    say: Callable[[str], None],
    reserved: int = 0,
) -> dict[str, Scheme]:
    """Returns `base` with other numbers of bits, which minimize the increase of the loss within `budget` bytes.

    The function chooses the bits of each parameter whose name matches `allocate.match` and whose scheme supports
    several numbers of bits.

    Args:
        allocate: the bits and clips to choose from, and the pattern of parameter names.
        budget: the limit of the artifact in bytes. `reserved` is already subtracted.
        base: the scheme of each parameter before allocation.
        costs: maps the candidate schemes of each parameter to estimates of the increase of the loss, in nats per token.
        estimate: returns the estimated size in bytes of a parameter with a scheme.
        exact: returns the exact size in bytes of the whole artifact for an allocation. This size decides whether the
            allocation fits, and corrects the estimates.
        say: the function that receives a message for each allocation that is measured.
        reserved: the number of bytes that the code of a submission occupies, for messages.

    Returns:
        The scheme of each parameter, in the order of `base`.

    Raises:
        QuantizeError: if the smallest allocation exceeds the budget, or no parameter has a choice of bits.
    """
    able = {name: _variants(name, scheme, allocate) for name, scheme in base.items()}
    able = {name: schemes for name, schemes in able.items() if len(schemes) > 1}
    if not able:
        message = (
            f"quant.allocate: no parameter of {allocate.match!r} supports several of the bits {list(allocate.bits)}"
        )
        raise QuantizeError(
            message, "widen quant.allocate.match, or give the parameters a scheme with a choice of bits"
        )
    rises, names = costs(able), list(able)
    choices = {name: tuple(zip(able[name], rises[name], strict=True)) for name in names}
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
        raise too_large(
            tried[smallest], "even with the fewest bits that quant.allocate can choose", budget, reserved, hint
        )
    low, high = estimated(smallest), None  # the largest estimate that fits, and the smallest that is too large
    target = low + budget - tried[smallest]
    for _ in range(4 * ROUNDS):
        picks = knapsack(sized, target)
        if picks is None or (picks not in tried and len(tried) > ROUNDS):
            break
        if picks not in tried:
            tried[picks] = exact(schemes(picks))
            say(f"allocate: {tried[picks]:,} of {budget:,} bytes, {nats(picks):.5f} nats per token (estimated)")
        left = budget - tried[picks]
        if 0 <= left < budget * ENOUGH:
            break
        low, high = (max(low, target), high) if left >= 0 else (low, target)
        wanted = (
            estimated(picks) + left
        )  # the error of the estimate for the last measured allocation corrects the next estimate
        if (high is None and wanted <= target) or (high is not None and high - low <= 1):
            break
        target = wanted if high is None or low < wanted < high else (low + high) // 2
    fitting = [picks for picks, size in tried.items() if size <= budget]
    return schemes(min(fitting, key=lambda picks: (nats(picks), tried[picks])))


def _variants(name: str, scheme: Scheme, allocate: Allocate) -> tuple[Scheme, ...]:
    return variants(scheme, allocate.bits, allocate.clip_stds) if matches(allocate.match, name) else ()


def largest_errors(names: Sequence[str], errors: Callable[[str], Tensor], count: int) -> tuple[str, ...]:
    """Returns the names of the `count` parameters whose quantization errors have the largest Frobenius norms.

    `errors` returns the error of the parameter with a given name.
    """
    norms = {name: float(torch.linalg.vector_norm(errors(name).double())) for name in names}
    return tuple(sorted(names, key=lambda name: (-norms[name], name))[:count])
