"""Terms of the training loss: their gradients, their weights during a run, and scores without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import read_log
from run_samples import small_spec, write_text

from specc.runtime.metrics.loss_terms import loss_terms
from specc.runtime.model.load import instantiate
from specc.runtime.train import trainer as trainer_module
from specc.runtime.train.train import TrainOptions, train

TERMS = (
    "train.losses=[{kind: next_token, weight: 0.5}, {kind: z, weight: 0.01}, "
    "{kind: auxiliary, name: mlp.activation, weight: 0.1}, {kind: auxiliary, name: attention.activation, weight: 0.2}]"
)


def filled(loaded: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return loaded.model.double()


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_gradients_are_those_of_the_weighted_sum(fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through logits and losses that are summed by hand, in float64."""
    loaded = instantiate(small_spec(TERMS), "cpu", tmp_path, fuse)
    model = filled(loaded)
    names = [name for name, _ in loaded.programs.program("train").inputs]
    assert names[2:] == ["next_token_weight", "z_weight", "mlp_activation_weight", "attention_activation_weight"]
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(1))
    weights = [torch.tensor(value, dtype=torch.float64) for value in (0.5, 0.01, 0.1, 0.2)]
    model(ids, targets, *weights).backward()
    results = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    stated: list[tuple[torch.Tensor, torch.Tensor]] = []
    module: Any = __import__("sys").modules[type(model).__module__]
    monkeypatch.setattr(module, "attach_loss", lambda x, loss, weight: stated.append((loss, weight)) or x)
    x = model.features(ids, mlp_activation_weight=weights[2], attention_activation_weight=weights[3])
    assert len(stated) == 4  # two layers in each of two blocks
    logits = 30 * torch.tanh(x @ model.embed.token.T / 30)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    total = 0.5 * nats + 0.01 * logits.logsumexp(-1).square().mean() + sum(weight * loss for loss, weight in stated)
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(results[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_each_term_is_measured_by_its_name(fuse: bool, tmp_path: Path) -> None:
    """Against the formulas in float64; a layer's loss is summed over the blocks. Buffers and gradients stay."""
    spec = small_spec(TERMS.replace("weight: 0.5", "weight: 1"))
    loaded = instantiate(spec, "cpu", tmp_path, fuse)
    model = filled(loaded)
    model.register_buffer("counts", torch.zeros(()))
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(1))

    def program(*inputs: torch.Tensor) -> torch.Tensor:
        model.counts += 1
        loss: torch.Tensor = model(*inputs)
        return loss

    values = loss_terms(model, program, spec.train.losses, (ids, targets))
    assert model.counts == 0 and all(parameter.grad is None for parameter in model.parameters())
    assert list(values) == ["next_token", "z", "mlp.activation", "attention.activation"]
    outputs: dict[str, float] = {"mlp.activation": 0.0, "attention.activation": 0.0}
    module: Any = __import__("sys").modules[type(model).__module__]
    real, weights = module.attach_loss, [torch.tensor(value, dtype=torch.float64) for value in (0.1, 0.2)]
    try:

        def noted(x: torch.Tensor, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            outputs["mlp.activation" if weight is weights[0] else "attention.activation"] += float(
                x.detach().square().mean()
            )
            return x

        module.attach_loss = noted
        x = model.features(ids, mlp_activation_weight=weights[0], attention_activation_weight=weights[1])
    finally:
        module.attach_loss = real
    logits = 30 * torch.tanh(x.detach() @ model.embed.token.detach().T / 30)
    wanted = {
        "next_token": float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())),
        "z": float(logits.logsumexp(-1).square().mean()),
        **outputs,
    }
    assert values == pytest.approx(wanted, rel=1e-6)


def test_terms_are_logged_and_measuring_them_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, records = str(write_text(tmp_path / "data")), dict[str, list[dict[str, Any]]]()
    for name in ("measured", "not"):
        if name == "not":
            monkeypatch.setattr(trainer_module, "loss_terms", lambda *given: {})
        spec = small_spec("train.steps=4", "train.validate_every=2", TERMS)
        result = train(TrainOptions(spec, "cpu", data, tmp_path / name), lambda line: None)
        records[name] = read_log(result.run / "log.jsonl")
    terms = [record for record in records["measured"] if record["event"] == "losses"]
    assert [record["step"] for record in terms if record["weights"] == "raw"] == [2, 4]
    assert terms[0]["terms"].keys() == {"next_token", "z", "mlp.activation", "attention.activation"}
    assert min(terms[0]["terms"].values()) > 0
    losses = [[r["loss"] for r in records[name] if "loss" in r] for name in records]
    assert losses[0] == losses[1] and not [record for record in records["not"] if record["event"] == "losses"]


def test_scores_have_no_terms(tmp_path: Path) -> None:
    """The program `score`, and with it validation and bits per byte, is that of the spec without terms."""
    models = [filled(instantiate(small_spec(*terms), "cpu", tmp_path / str(len(terms)))) for terms in ((), (TERMS,))]
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(1))
    plain, weighted = (model.score(ids, targets) for model in models)
    assert torch.equal(plain, weighted)


def test_a_weight_that_falls_to_zero_leaves_the_plain_run(tmp_path: Path) -> None:
    """With a z-loss of weight 0 a run is that without it; its weights change while it trains."""
    data = str(write_text(tmp_path / "data"))

    def losses(name: str, *terms: str) -> list[float]:
        result = train(
            TrainOptions(small_spec("train.steps=4", *terms), "cpu", data, tmp_path / name), lambda line: None
        )
        return [record["loss"] for record in read_log(result.run / "log.jsonl") if record["event"] == "step"]

    plain = losses("plain")
    off = losses("off", "train.losses=[{kind: next_token}, {kind: z, weight: 0}]")
    late = losses("late", "train.losses=[{kind: next_token}, {kind: z, weight: {at: [[0, 0], [0.5, 0.1]]}}]")
    assert off == pytest.approx(plain, rel=1e-6)
    assert late[:2] == pytest.approx(plain[:2], rel=1e-6) and all(
        a > b + 0.5 for a, b in zip(late[2:], plain[2:], strict=True)
    )


def test_a_layer_states_only_losses_that_have_a_weight() -> None:
    plain = small_spec().model.lower("m")
    ops = {node.op.name for graph in plain.graphs for node in graph.nodes}
    assert "linear" in ops and not {"attach_loss", "mean_square"} & ops


LATER = (
    "train.losses=[{kind: next_token}, {kind: later_token, ahead: 2, weight: 0.5, bos: 256}, "
    "{kind: later_token, ahead: 4, weight: 0.25}]"
)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_later_tokens_are_targets_of_the_same_logits(fuse: bool, tmp_path: Path) -> None:
    """Against cross-entropies that are summed token by token, in float64. Rows end, and so do documents."""
    loaded = instantiate(small_spec(LATER), "cpu", tmp_path, fuse)
    model = filled(loaded)
    names = [name for name, _ in loaded.programs.program("train").inputs]
    assert names[2:] == ["later_token_2_weight", "later_token_4_weight"]
    ids, targets = torch.randint(256, (2, 3, 32), generator=torch.Generator().manual_seed(1))
    targets[1, 10] = targets[2, 0] = targets[2, 31] = 256
    loss = model(ids, targets, *(torch.tensor(value, dtype=torch.float64) for value in (0.5, 0.25)))
    loss.backward()
    results = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = 30 * torch.tanh(model.features(ids) @ model.embed.token.T / 30)
    log_p, total = logits.log_softmax(-1), torch.zeros((), dtype=torch.float64)
    for b in range(3):
        for t in range(32):
            for weight, ahead, bos in ((1.0, 1, -1), (0.5, 2, 256), (0.25, 4, -1)):
                if t + ahead <= 32 and bos not in targets[b, t : t + ahead - 1]:
                    total = total - weight * log_p[b, t, targets[b, t + ahead - 1]] / 96
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=0)
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_later_tokens_of_weight_zero_leave_the_plain_gradients_and_scores(tmp_path: Path) -> None:
    gradients = []
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(1))
    for i, terms in enumerate(((), (LATER,))):
        model = filled(instantiate(small_spec(*terms), "cpu", tmp_path / str(i))).float()
        model(ids, targets, *[torch.zeros(())] * 2 * len(terms)).backward()
        gradients.append([*(parameter.grad for parameter in model.parameters()), model.score(ids, targets)])
    for plain, weighted in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, weighted, rtol=2e-5, atol=1e-8)
    assert torch.equal(gradients[0][-1], gradients[1][-1])
