"""Training on pairs: steps counted in samples, teacher forcing by schedule, the same step however it is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pair_toy import TOKENS, WIDTH, PairToy, pair_spec, pair_trainer, pairs
from torch import Tensor, nn

from specc.compiler.changing_values import ForcingSchedule
from specc.runtime.optim.schedule import Moment
from specc.runtime.storage import checkpoint
from specc.runtime.train.sources.feed import shifted
from specc.runtime.train.sources.micro_batches import BatchError, micro_batches


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The forcings that the model was asked to fill in; its own token is always 7."""
    asked: list[Tensor] = []

    def decoder_inputs(
        model: nn.Module, source: Tensor, target: Tensor, forcing: Tensor, writes: tuple[str, str]
    ) -> Tensor:
        assert forcing.dtype == torch.bool and forcing.shape == target.shape
        asked.append(forcing)
        return torch.where(forcing, shifted(target), 7)

    monkeypatch.setattr("specc.runtime.train.sources.feed.decoder_inputs", decoder_inputs)
    return asked


def weights(run_trainer: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in run_trainer.masters.tensors.values()]).clone()


def steps(run_trainer: Any, count: int) -> list[Any]:
    results = [step for _ in range(count) for step in run_trainer.advance()]
    run_trainer.loader.close()
    return results


def test_it_learns_and_counts_samples_and_tokens() -> None:
    run_trainer = pair_trainer(pair_spec(steps=60))
    run_trainer.clock.start()
    result = steps(run_trainer, 60)
    run_trainer.clock.stop()
    assert result[-1].loss < 0.7 * result[0].loss
    whole = pairs()
    per_sample = ((whole.source != 0).sum() + (whole.target != 0).sum()) / 200
    assert run_trainer.totals()["samples"] == 60 * 24
    assert run_trainer.totals()["tokens"] == pytest.approx(60 * 24 * per_sample, rel=0.02)
    assert all(
        step.tokens_per_second / step.samples_per_second == pytest.approx(per_sample, rel=0.2) for step in result
    )
    assert run_trainer.totals()["samples_per_second"] == pytest.approx(
        run_trainer.totals()["samples"] / run_trainer.clock.seconds
    )


def test_the_loss_is_the_mean_over_the_targets_tokens() -> None:
    run_trainer = pair_trainer(pair_spec(steps=1))
    source, target, _ = run_trainer.loader.next()
    run_trainer.loader.restore(pair_trainer().loader.state())
    with torch.no_grad():
        losses = PairToy().score(source, target)
    (step,) = steps(run_trainer, 1)
    assert step.loss == pytest.approx(float(losses.sum() / (target != 0).sum()), rel=1e-6)


def test_micro_batches_make_the_same_step() -> None:
    run_trainer, many = pair_trainer(), pair_trainer(pair_spec(micro_batch=4))
    assert (run_trainer.micro_batches, many.micro_batches) == (1, 6)
    for a, b in zip(steps(run_trainer, 5), steps(many, 5), strict=True):
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-5)
    assert torch.allclose(weights(run_trainer), weights(many), atol=1e-5)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    assert micro_batches(pair_spec(batch=768), 30, 2) == 1
    assert micro_batches(pair_spec(batch=768, micro_batch=96), 30, 2) == 4
    with pytest.raises(BatchError, match=r"train.batch 768 is not a multiple of micro_batch 256 x 2 processes = 512"):
        micro_batches(pair_spec(batch=768, micro_batch=256), 30, 2)
    with pytest.raises(BatchError, match=r"train.batch 10 is not a multiple of micro_batch 3 x 3 processes = 9"):
        micro_batches(pair_spec(batch=10), 30, 3)


def test_the_truth_is_fed_one_place_later() -> None:
    target = torch.tensor([[5, 6, 2, 0], [9, 2, 0, 0]])
    assert shifted(target).tolist() == [[1, 5, 6, 2], [1, 9, 2, 0]]
    assert target.tolist() == [[5, 6, 2, 0], [9, 2, 0, 0]]


def test_schedules_hold_or_go_in_a_straight_line() -> None:
    points = ((0, 1.0), (10, 0.5), (30, 0.0))
    hold, line = (ForcingSchedule(at=points, by="step", between=between) for between in ("step", "linear"))
    assert [hold.value(when) for when in (0, 9, 10, 29, 30, 99)] == [1, 1, 0.5, 0.5, 0, 0]
    assert [line.value(when) for when in (0, 5, 10, 20, 30, 99)] == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


def test_forcing_follows_steps_and_epochs(drawn: list[Tensor]) -> None:
    run_trainer = pair_trainer(pair_spec(teacher_forcing={"at": ((0, 1.0), (3, 0.5)), "by": "step"}))
    steps(run_trainer, 6)
    assert len(drawn) == 3  # nothing is drawn, and no token made, while all is forced
    assert len({tuple(map(tuple, forcing.tolist())) for forcing in drawn}) == 3
    share = torch.cat(drawn).float().mean()
    assert abs(float(share) - 0.5) < 5 * (0.25 / (3 * 24 * WIDTH)) ** 0.5
    by_epoch = pair_trainer(pair_spec(teacher_forcing={"at": ((0, 1.0), (1, 0.0)), "by": "epoch"}))
    assert [by_epoch.feed.probability(Moment(step=step)) for step in (0, 8, 9, 20)] == [1, 1, 0, 0]  # type: ignore[attr-defined]
    linear = {"at": ((0, 1.0), (2, 0.0)), "by": "epoch", "between": "linear"}
    feed = pair_trainer(pair_spec(teacher_forcing=linear)).feed
    assert feed.probability(Moment(step=5)) == pytest.approx(1 - 5 * 24 / 200 / 2)  # type: ignore[attr-defined]


def test_forcing_is_the_same_however_a_step_is_cut(drawn: list[Tensor]) -> None:
    spec = {"teacher_forcing": 0.3}
    whole = pair_trainer(pair_spec(**spec))
    steps(whole, 2)
    first = drawn.copy()
    drawn.clear()
    steps(pair_trainer(pair_spec(**spec, micro_batch=8)), 2)
    assert [torch.equal(torch.cat(drawn[3 * i : 3 * i + 3]), first[i]) for i in range(2)] == [True, True]
    for rank in range(2):
        drawn.clear()
        from specc.runtime.distributed.world import World

        feed = pair_trainer(pair_spec(**spec), world=World(rank, 2)).feed
        part = feed._forced_positions(0.3, 0, 0, WIDTH)  # type: ignore[attr-defined]
        assert np.array_equal(part, first[0].numpy()[rank::2])


def test_resuming_is_exact_with_forcing(drawn: list[Tensor], tmp_path: Path) -> None:
    train = pair_spec(teacher_forcing={"at": ((0, 1.0), (4, 0.5)), "by": "step"}, micro_batch=12)
    whole = pair_trainer(train)
    expected = [step.loss for step in steps(whole, 10)]
    for stop in (2, 6):
        run_trainer = pair_trainer(train)
        losses = [step.loss for step in steps(run_trainer, stop)]
        path = checkpoint.save(tmp_path / str(stop), run_trainer.snapshot())
        two = pair_trainer(train)
        two.restore(checkpoint.load(path))
        losses += [step.loss for step in steps(two, 10 - stop)]
        assert losses == expected
        assert torch.equal(weights(two), weights(whole))
        assert two.totals()["samples"] == whole.totals()["samples"] == 240
        assert two.totals()["tokens"] == whole.totals()["tokens"]


def test_warm_up_leaves_everything_as_it_was() -> None:
    cold, warm = pair_trainer(), pair_trainer()
    warm.warm_up(TOKENS.vocab)
    assert torch.equal(weights(cold), weights(warm))
    assert [step.loss for step in steps(cold, 3)] == [step.loss for step in steps(warm, 3)]
    assert cold.totals()["tokens"] == warm.totals()["tokens"]
