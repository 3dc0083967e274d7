"""The expected calibration error, by hand and of probabilities that are right by construction."""

import pytest
import torch

from specc.runtime.compare.calibration import BINS, Tally


def test_the_error_of_four_predictions_by_hand() -> None:
    """Two of probability 0.9, of which one is right; two of 0.6 and 0.65 (the same bin), both right."""
    tops = torch.tensor([0.9, 0.9, 0.6, 0.65, 0.99])
    logits = torch.stack([tops, 1 - tops], 1).log()
    tally = Tally()
    tally.add(logits, torch.tensor([0, 1, 0, 0, 0]), torch.tensor([True, True, True, True, False]))
    result = tally.result()
    assert result.tokens == 4 and result.accuracy == 0.75
    assert result.ece == pytest.approx(0.5 * abs(0.5 - 0.9) + 0.5 * abs(1 - 0.625))
    assert result.confidence == pytest.approx((0.9 + 0.9 + 0.6 + 0.65) / 4)
    assert result.nats == pytest.approx(-(tops[0] * (1 - tops[1]) * tops[2] * tops[3]).log().item() / 4)
    assert [(entry.count, entry.low) for entry in result.bins if entry.count] == [(2, 9 / BINS), (2, 13 / BINS)]


def test_targets_drawn_from_the_probabilities_are_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20000, 30, generator=generator)
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    every = torch.ones(len(targets), dtype=torch.bool)
    calibrated, sharper = Tally(), Tally()
    for part in torch.arange(20000).split(4096):
        calibrated.add(logits[part], targets[part], every[part])
    sharper.add(3 * logits, targets, every)
    assert calibrated.result().ece < 0.015
    assert sharper.result().ece > 0.3 and sharper.result().nats > calibrated.result().nats


def test_certainty_is_in_the_last_bin() -> None:
    tally = Tally()
    tally.add(torch.tensor([[100.0, -100.0]]), torch.tensor([0]), torch.tensor([True]))
    result = tally.result()
    assert result.bins[-1].count == 1 and result.ece == pytest.approx(0, abs=1e-12)
