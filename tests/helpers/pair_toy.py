"""A small model of pairs of lines and its trainer, for tests of training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler.programs.init import constant
from specc.compiler.programs.programs import Parameter
from specc.compiler.spec.train import TrainSpec
from specc.runtime.data.lines.loader import FixedSet, PairLoader
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.lines.polynomial import SYMBOLS, draw
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.distributed.world import World
from specc.runtime.train.sources.feed import Forced
from specc.runtime.train.sources.micro_batches import micro_batches
from specc.runtime.train.trainer import TrainableModel, Trainer

CPU = torch.device("cpu")
TOKENS = CharTokenizer(SYMBOLS)
WIDTH = 30
SHAPES = {"source": (TOKENS.vocab, 12), "inputs": (TOKENS.vocab, 12), "head": (TOKENS.vocab, 12)}


class PairToy(nn.Module):
    """The next character of the target from the one before and the sum of the source's."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(0.3 * torch.randn(shape, generator=generator)))

    def logits(self, source: Tensor, inputs: Tensor) -> Tensor:
        seen = F.embedding(source, self.source).mean(1, keepdim=True)
        return torch.tanh(seen + F.embedding(inputs, self.inputs)) @ self.head.T

    def forward(self, source: Tensor, inputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(source, inputs).flatten(0, 1), target.flatten(), ignore_index=0)

    def score(self, source: Tensor, target: Tensor) -> Tensor:
        inputs = torch.cat((torch.ones_like(target[:, :1]), target[:, :-1]), 1)
        losses = F.cross_entropy(self.logits(source, inputs).transpose(1, 2), target, ignore_index=0, reduction="none")
        return losses


def parameters() -> tuple[Parameter, ...]:
    return tuple(Parameter(name, shape, "f32", constant(0.0)) for name, shape in SHAPES.items())


def pair_spec(**changes: Any) -> TrainSpec:
    given: dict[str, Any] = {
        "data": {"kind": "polynomial", "lines": 200},
        "batch": 24,
        "steps": 12,
        "optimizers": ({"kind": "adamw", "match": "*", "lr": 0.01},),
        "average": {"kind": "ema", "decay": 0.9},
    }
    return TrainSpec.model_validate({**given, **changes})


def pairs(count: int = 200, stream: str = "train") -> Pairs:
    return Pairs.of(draw(stream, 42, 0, count), TOKENS, WIDTH)


def pair_trainer(
    train: TrainSpec | None = None,
    model: nn.Module | None = None,
    world: World | None = None,
    device: torch.device = CPU,
    compiled: bool = False,
) -> Trainer:
    """A trainer at step 0; equal arguments give equal trainers."""
    train, world, model = train or pair_spec(), world or World.alone(), model or PairToy()
    torch.manual_seed(train.seed)
    rows, passes = train.at_once(world.size), micro_batches(train, WIDTH, world.size)
    loader = PairLoader(FixedSet(pairs(), train.seed, device), rows, passes, device, world.rank, world.size)
    feed = Forced(loader, model, train.teacher_forcing, 200, train.seed)
    trainable = TrainableModel(model, parameters(), WIDTH, "digest")
    return Trainer(trainable, train, feed, world.on(device), compiled)
