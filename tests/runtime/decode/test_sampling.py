"""Draws: their distribution is the one that is asked for, and settings that no distribution has are refused."""

import math
from typing import Any

import pytest
import torch

from specc.runtime.decode.text import Sampling, SamplingError


def reference(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """The definition, by plain lists: sort, cut, renormalize."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [1.0 if i == order[0] else 0.0 for i in range(len(logits))]
    order = order[:top_k]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    total, candidates, mass = sum(weights.values()), [], 0.0
    for i in order:
        candidates.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    whole = sum(weights[i] for i in candidates)
    return [weights[i] / whole if i in candidates else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 1.0), (0.7, 5, 1.0), (1.3, None, 0.8), (0.9, 12, 0.5), (2.0, 1, 1.0), (0.0, 3, 0.5),
     (1e-300, 4, 1.0), (1.0, 999, 0.999), (1.0, None, 1e-9)],
)  # fmt: skip
def test_probabilities_are_those_of_the_definition(temperature: float, top_k: int | None, top_p: float) -> None:
    for seed in range(20):
        logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
        logits[7] = logits[11]  # equals
        got = Sampling(temperature, top_k, top_p).probabilities(logits)
        expected = torch.tensor(reference(logits.tolist(), temperature, top_k, top_p), dtype=torch.float64)
        assert float((got - expected).abs().max()) < 1e-12
        assert float(got.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, top_k=4), Sampling(1.2, top_p=0.7), Sampling(1.0, 6, 0.9)]
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    chances = sampling.probabilities(logits)
    draws = 20_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(sampling.pick(logits.expand(draws, 12), uniform), minlength=12).double()
    possible = chances > 0
    assert float(counts[~possible].sum()) == 0
    chi_square = float(((counts - draws * chances)[possible].square() / (draws * chances[possible])).sum())
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # 4 standard deviations; the seed is fixed


def test_a_token_without_a_chance_is_never_drawn_at_either_end() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1.0 - 2**-53, 1.0], dtype=torch.float64)
    assert Sampling().pick(logits.expand(5, 5), uniform).tolist() == [1, 1, 3, 3, 3]


def test_temperature_zero_takes_the_first_of_equals() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    uniform = torch.linspace(0, 1, 20, dtype=torch.float64)
    assert set(Sampling(0.0).pick(logits.expand(20, 4), uniform).tolist()) == {1}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(0.5, 2, 0.9)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_give_no_token(value: float, sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, value, 1.0], [-math.inf] * 3, [0.0, 9.0, -math.inf]])
    assert sampling.pick(logits, torch.full((4,), 0.5, dtype=torch.float64)).tolist() == [1, -1, -1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be"),
        ({"temperature": float("nan")}, "temperature is nan; it must be"),
        ({"temperature": float("inf")}, "temperature is inf; it must be"),
        ({"top_k": 0}, "top-k is 0; it must be"),
        ({"top_p": 0.0}, "top-p is 0.0; it must be"),
        ({"top_p": 1.1}, "top-p is 1.1; it must be"),
        ({"top_p": float("nan")}, "top-p is nan; it must be"),
    ],
)
def test_settings_out_of_range_are_usage_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message) as caught:
        Sampling(**settings)
    assert caught.value.exit_code == 2
