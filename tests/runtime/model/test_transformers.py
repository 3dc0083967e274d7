"""Models of `transformers`, said as specs: with equal weights, logits, cached decoding and gradients agree."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from family import CONTEXT, Family, KnownFamily, randomized
from tiny_models import spec_of
from torch import Tensor, nn
from torch.nn import functional as F

from specc.runtime.model.load import instantiate

TOKENS = 60  # longer than any window drawn
STEPS = 40


@dataclass(frozen=True)
class Twins:
    """A model of `transformers` and the generated module with its weights."""

    family: Family | KnownFamily
    config: Any
    theirs: nn.Module
    ours: Any
    ids: Tensor

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def twins(name: str, seed: int, fuse: bool, folder: Path) -> Twins:
    family = FAMILIES[name]
    config = family.config(random.Random(f"{name} {seed}"))
    theirs = randomized(config, seed)
    ours = instantiate(spec_of(family.spec(config)), "cpu", folder, fuse).model
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for key, value in family.parameters(theirs, weights, shapes_of(ours)).items():
            ours.get_parameter(key).copy_(value)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ids = torch.randint(config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return Twins(family, config, theirs, ours, ids)


@pytest.fixture(
    params=[(name, seed, fuse) for name in FAMILIES for seed, fuse in enumerate((True, False, True))],
    ids=lambda p: f"{p[0]}-{p[1]}-{'fused' if p[2] else 'plain'}",
    scope="module",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    name, seed, fuse = request.param
    return twins(name, seed, fuse, tmp_path_factory.mktemp(name))


def test_scores_of_a_whole_text(pair: Twins) -> None:
    """The log-probability of every token at every position, through the program that scores."""
    row, count = pair.ids[:1], pair.vocabulary
    with torch.no_grad():
        expected = F.log_softmax(pair.theirs(row).logits[0], -1)
        targets = torch.arange(count).unsqueeze(1).expand(count, TOKENS)
        nats = pair.ours.score(row.expand(count, -1), targets)
    torch.testing.assert_close(-nats.T, expected, rtol=0, atol=1e-4)


def test_prefill_and_cached_steps(pair: Twins) -> None:
    """Logits behind a prompt, then behind each of 40 further tokens."""
    prompt = TOKENS - STEPS
    with torch.no_grad():
        expected = pair.theirs(pair.ids).logits
        cache = pair.ours.new_cache(2, CONTEXT)
        logits = pair.ours.prefill(pair.ids[:, :prompt], torch.tensor(0), cache)
        torch.testing.assert_close(logits, expected[:, prompt - 1], rtol=0, atol=1e-4)
        for t in range(prompt, TOKENS):
            logits = pair.ours.decode(pair.ids[:, t : t + 1], torch.tensor(t), cache)
            torch.testing.assert_close(logits, expected[:, t], rtol=0, atol=1e-4)
        whole = pair.ours.prefill(pair.ids, torch.tensor(0), pair.ours.new_cache(2, CONTEXT))
        torch.testing.assert_close(whole, expected[:, -1], rtol=0, atol=1e-4)


def test_gradients_of_the_loss(pair: Twins) -> None:
    """Each parameter's gradient within a thousandth of its norm. A bias of k without rotary positions has none but
    rounding: it is judged by the norm of all gradients."""
    ids, targets = pair.ids[:, :-1], pair.ids[:, 1:]
    expected = F.cross_entropy(pair.theirs(ids).logits.flatten(0, 1), targets.flatten())
    parameters = dict(pair.theirs.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(expected, list(parameters.values())), strict=True))
    least = 1e-5 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    loss = pair.ours(ids, targets)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-4)
    names = [name for name, _ in pair.ours.named_parameters()]
    wanted_of = pair.family.parameters(pair.theirs, gradients, shapes_of(pair.ours))
    for name, gradient in zip(names, torch.autograd.grad(loss, list(pair.ours.parameters())), strict=True):
        wanted = wanted_of[name]
        assert (gradient - wanted).norm() <= 1e-3 * max(wanted.norm(), least), name
