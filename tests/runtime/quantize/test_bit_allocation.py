"""Bits as an optimization: the knapsack and the allocation against trying everything."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import Allocate
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.bit_allocation import CELLS, Option, allocate_bits, knapsack


def best_by_trying(options: list[list[Option]], budget: int) -> float | None:
    fitting = [picks for picks in itertools.product(*options) if sum(size for size, _ in picks) <= budget]
    return min((sum(cost for _, cost in picks) for picks in fitting), default=None)


def test_the_knapsack_is_the_best_of_all() -> None:
    """Budgets below the number of cells: then it is exact to the byte."""
    draw = random.Random(4)
    some = 0
    for _ in range(300):
        options = [
            [(draw.randint(0, 90), draw.choice([0.0, 1.0, draw.random(), draw.random() ** 8])) for _ in range(n)]
            for n in (draw.randint(1, 4) for _ in range(draw.randint(1, 5)))
        ]
        budget = draw.randint(0, 400)
        result, wanted = knapsack(options, budget), best_by_trying(options, budget)
        if wanted is None:
            assert result is None
            continue
        assert result is not None
        assert sum(item[i][0] for item, i in zip(options, result, strict=True)) <= budget
        assert sum(item[i][1] for item, i in zip(options, result, strict=True)) == pytest.approx(wanted, abs=1e-12)
        some += 1
    assert some > 200


def test_large_budgets_are_kept_and_nearly_used() -> None:
    draw = random.Random(5)
    options = [[(n * draw.randint(9000, 40000), 4.0**-n * draw.random()) for n in range(4, 9)] for _ in range(66)]
    budget = int(1.3 * sum(item[0][0] for item in options))
    result = knapsack(options, budget)
    assert result is not None
    used = sum(item[i][0] for item, i in zip(options, result, strict=True))
    assert budget - 66 * (budget // CELLS + 1) - 40000 < used <= budget
    # No exchange of one width for another is better and still fits.
    for item, i in zip(options, result, strict=True):
        for size, cost in item:
            assert used - item[i][0] + size > budget - 66 * (budget // CELLS + 1) or cost >= item[i][1]


BASE: dict[str, Scheme] = {"a": Gptq(bits=5), "b": Gptq(bits=5), "c": Gptq(bits=5), "gain": Unquantized(dtype="f16")}
WEIGHTS = {"a": 64.0, "b": 1.0, "c": 8.0}


def cost(name: str, scheme: Scheme) -> float:
    return WEIGHTS[name] * 4.0 ** -scheme.bits_per_value()


def costs(options: Mapping[str, Sequence[Scheme]]) -> dict[str, list[float]]:
    return {name: [cost(name, scheme) for scheme in schemes] for name, schemes in options.items()}


def size(name: str, scheme: Scheme) -> int:
    return int(1000 * scheme.bits_per_value())


@pytest.mark.parametrize("off", [-700, 0, 900])
@pytest.mark.parametrize("budget", [14_000, 15_100, 17_050, 24_000, 90_000])
def test_the_exact_size_decides(budget: int, off: int) -> None:
    """The estimate may be off, by a number and by a share; the result fits and no better one does."""
    wish = Allocate(bits=(4, 5, 6, 7, 8))

    def exact(schemes: Mapping[str, Scheme]) -> int:
        return off + int(1.02 * sum(size(name, schemes[name]) for name in WEIGHTS))

    chosen = allocate_bits(wish, budget, BASE, costs, size, exact, lambda _: None)
    assert list(chosen) == list(BASE) and chosen["gain"] == BASE["gain"] and exact(chosen) <= budget
    every = [
        dict(zip(WEIGHTS, map(BASE["a"].with_bits, bits), strict=True))
        for bits in itertools.product(range(4, 9), repeat=3)
    ]
    fitting = [sum(cost(n, s) for n, s in allotment.items()) for allotment in every if exact(allotment) <= budget]
    assert sum(cost(name, chosen[name]) for name in WEIGHTS) == pytest.approx(min(fitting))


def test_what_cannot_be_done_is_said() -> None:
    wish = Allocate(bits=(4, 5))
    with pytest.raises(QuantizeError, match=r"13,000 bytes even with the fewest bits .*; the budget is 12,999 bytes"):
        allocate_bits(wish, 12_999, BASE, costs, size, lambda s: 13_000, lambda _: None)
    with pytest.raises(QuantizeError, match=r"no parameter of 'gain' supports several of the bits \[4, 5\]"):
        allocate_bits(Allocate(bits=(4, 5), match="gain"), 1, BASE, costs, size, lambda s: 0, lambda _: None)
    narrow = allocate_bits(
        Allocate(bits=(2, 3, 4)),
        99_999,
        {"t": Round(bits=8)},
        lambda able: {"t": [1.0] * len(able["t"])},
        size,
        lambda s: 0,
        lambda _: None,
    )
    assert narrow["t"].bits_per_value() == 2  # of equal costs the fewest bytes
