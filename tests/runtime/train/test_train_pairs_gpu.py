"""Training on pairs on a GPU: the captured step is the eager one, with all tokens forced and with the model's own."""

import pytest
import torch
from pair_toy import CPU, TOKENS, pair_spec, pair_trainer
from torch import Tensor, nn

from specc.runtime.train.sources.feed import shifted

pytestmark = pytest.mark.gpu
FORCING = {"at": ((0, 1.0), (6, 0.5)), "by": "step"}


@pytest.mark.parametrize("micro_batch", [24, 8])
def test_a_captured_step_is_the_eager_one(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across the step from which tokens are drawn: nothing is captured anew, only what the graph reads."""

    def decoder_inputs(
        model: nn.Module, source: Tensor, target: Tensor, forcing: Tensor, writes: tuple[str, str]
    ) -> Tensor:
        return torch.where(forcing, shifted(target), 7)

    monkeypatch.setattr("specc.runtime.train.sources.feed.decoder_inputs", decoder_inputs)
    fast = {"optimizers": ({"kind": "adamw", "match": "*", "lr": 0.1},), "steps": 12, "micro_batch": micro_batch}
    train, forced = pair_spec(**fast, teacher_forcing=FORCING), pair_trainer(pair_spec(**fast))
    truth = [step.loss for _ in range(12) for step in forced.advance()]
    forced.loader.close()
    results = []
    for device, compiled in ((CPU, False), (torch.device("cuda"), False), (torch.device("cuda"), True)):
        run_trainer = pair_trainer(train, device=device, compiled=compiled)
        if compiled:
            run_trainer.warm_up(TOKENS.vocab)
        steps = [step for _ in range(12) for step in run_trainer.advance()] + run_trainer.settle()
        run_trainer.loader.close()
        results.append(([step.loss for step in steps], run_trainer.totals()["tokens"], run_trainer.totals()["samples"]))
    assert [len(losses) for losses, _, _ in results] == [12, 12, 12]
    for losses, tokens, samples in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=2e-3)
        assert (tokens, samples) == results[0][1:]
    assert results[0][0][:6] == truth[:6] and results[0][0][6:] != pytest.approx(truth[6:], rel=0.01)
