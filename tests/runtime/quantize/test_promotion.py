"""Which parameters get more bits."""

from collections.abc import Callable, Mapping

import pytest
import torch

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.int8 import Int8
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import Promote, QuantSpec
from specc.runtime.artifact.artifact import ArtifactContents, measured_bytes
from specc.runtime.artifact.quantized_model import entropy_bytes, quantize_tensors
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.promotion import promote, promoted

BASE: dict[str, Scheme] = {
    "embed.table": Round(bits=8),
    **{f"blocks.{i}.mlp.{part}": Gptq(bits=5, order="natural") for i in range(4) for part in ("up", "down")},
    "head.gain": Unquantized(dtype="f16"),
}
TRACES = {
    "embed.table": 1e9,
    "blocks.0.mlp.up": 7.0,
    "blocks.0.mlp.down": 50.0,
    "blocks.1.mlp.up": 8.0,
    "blocks.1.mlp.down": 40.0,
    "blocks.2.mlp.up": 7.0,
    "blocks.2.mlp.down": 60.0,
    "blocks.3.mlp.up": 9.0,
    "blocks.3.mlp.down": 3.0,
    "head.gain": 1e9,
}
RANKED = [
    "blocks.2.mlp.down",
    "blocks.0.mlp.down",
    "blocks.1.mlp.down",
    "blocks.3.mlp.up",
    "blocks.1.mlp.up",
    "blocks.0.mlp.up",  # equal traces go by name
    "blocks.2.mlp.up",
    "blocks.3.mlp.down",
]


Measure = Callable[[Mapping[str, Scheme]], int]


def wide(schemes: Mapping[str, Scheme]) -> int:
    """The number of parameters with int6."""
    return sum(scheme.bits_per_value() == 6 for scheme in schemes.values())


def sizes(schemes: Mapping[str, Scheme]) -> int:
    """1,000 bytes, and 100 for each int6."""
    return 1000 + 100 * wide(schemes)


def promotion(
    count: int | None,
    budget: int | None = None,
    *,
    bits: int = 6,
    match: str = "*",
    base: Mapping[str, Scheme] = BASE,
    traces: Mapping[str, float] = TRACES,
    estimate: Measure = sizes,
    exact: Measure = sizes,
) -> list[str]:
    """The promoted names by trace. Checks that the order is that of the base, and that only bits changed."""
    quant = QuantSpec.model_construct(promote=Promote(bits=bits, count=count, match=match), budget_bytes=budget)
    lines: list[str] = []
    chosen = promote(quant, base, traces, estimate, exact, lines.append)
    assert list(chosen) == list(base) and all(line.endswith("is not promoted") for line in lines)
    names = promoted(base, chosen, traces)
    for name in base:
        assert chosen[name] == (base[name].with_bits(bits) if name in names else base[name])
    return list(names)


@pytest.mark.parametrize("count", range(1, 9))
def test_the_largest_traces_first(count: int) -> None:
    for traces in (TRACES, dict(reversed(TRACES.items()))):
        assert promotion(count, traces=traces) == RANKED[:count]


def test_match_restricts_the_candidates() -> None:
    assert promotion(2, bits=7, match="blocks.**.up") == ["blocks.3.mlp.up", "blocks.1.mlp.up"]
    assert promotion(1, match="blocks.{0,1}.mlp.*") == ["blocks.0.mlp.down"]


def test_parameters_without_a_trace_or_with_as_many_bits_are_no_candidates() -> None:
    traces = {name: trace for name, trace in TRACES.items() if "down" in name}
    base = {**BASE, "blocks.2.mlp.down": Gptq(bits=7)}
    assert promotion(3, base=base, traces=traces) == [f"blocks.{i}.mlp.down" for i in (0, 1, 3)]


@pytest.mark.parametrize("fits", range(9))
@pytest.mark.parametrize("slack", [-1, 0, 1])
def test_a_budget_is_kept_to_the_byte(fits: int, slack: int) -> None:
    budget = 1000 + 100 * fits + slack
    if budget < 1000:
        with pytest.raises(QuantizeError, match=r"takes 1,000 bytes before any promotion; the budget is 999 bytes"):
            promotion(None, budget)
        return
    assert promotion(None, budget) == RANKED[: fits - (slack == -1)]


def test_without_a_promotion_the_error_says_nothing_of_one() -> None:
    quant = QuantSpec.model_construct(promote=None, budget_bytes=999)
    with pytest.raises(QuantizeError, match=r"1,000 bytes with the bits of the rules; the budget is 999 ") as caught:
        promote(quant, {"head.up": Int8()}, {}, sizes, sizes, print)
    hint = "give some parameters a scheme with fewer bits, such as gptq or round, or raise quant.budget_bytes"
    assert caught.value.hint == hint


@pytest.mark.parametrize(("count", "budget", "expected"), [(3, 10**6, 3), (3, 1250, 2), (99, 10**6, 8)])
def test_count_bounds_the_budget(count: int, budget: int, expected: int) -> None:
    assert promotion(count, budget) == RANKED[:expected]


@pytest.mark.parametrize("budget", [1000, 1050, 1100, 1350, 1799, 1800, 10000])
@pytest.mark.parametrize(
    "estimate",
    [
        lambda s: 7 + 100 * wide(s),
        lambda s: 7 + 30 * wide(s),
        lambda s: 7 + 400 * wide(s),
        lambda s: 0,
        lambda s: 10**6 * (wide(s) > 0),
    ],
    ids=["right", "low", "high", "constant", "never"],
)
def test_the_exact_size_decides_for_any_estimate(budget: int, estimate: Measure) -> None:
    measured: list[int] = []

    def exact(schemes: Mapping[str, Scheme]) -> int:
        measured.append(wide(schemes))
        return sizes(schemes)

    assert promotion(None, budget, estimate=estimate, exact=exact) == RANKED[: (budget - 1000) // 100]
    assert len(measured) == len(set(measured))  # each measurement compresses all arrays


def test_it_stops_at_the_first_that_does_not_fit() -> None:
    """A smaller parameter further down the ranking does not jump the queue."""

    def measure(chosen: Mapping[str, Scheme]) -> int:
        return 1000 + sum((500 if name == RANKED[1] else 10) for name in BASE if chosen[name].bits_per_value() == 6)

    assert promotion(None, 1100, estimate=measure, exact=measure) == RANKED[:1]


def test_mistakes_are_named() -> None:
    with pytest.raises(QuantizeError, match=r"'blocks\.\*\.gate' matches no parameter"):
        promotion(1, match="blocks.*.gate")
    with pytest.raises(QuantizeError, match="count is 9, but only 8 parameters can have int6"):
        promotion(9)


def test_the_quick_estimate_is_close_to_the_artifact() -> None:
    generator = torch.Generator().manual_seed(1)
    schemes: dict[str, Scheme] = {"a": Round(bits=5), "b": Round(bits=6), "c": Unquantized(dtype="f16")}
    normal, wide = torch.randn(2, 256, 512, generator=generator)
    params = {"a": normal * torch.exp(0.4 * wide), "b": normal + wide, "c": torch.randn(64, generator=generator)}
    model = quantize_tensors(params, schemes, {})
    exact = measured_bytes(ArtifactContents(spec=b"{}", layout=model.layout(), tensors=model.tensors))
    assert abs(entropy_bytes(model) - exact) < 0.01 * exact
