"""A small model, data and trainer for tests of training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler.programs.init import constant
from specc.compiler.programs.programs import Parameter
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.train import TrainSpec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.distributed.world import World
from specc.runtime.log import Step
from specc.runtime.train.sources.feed import Windows
from specc.runtime.train.trainer import TrainableModel, Trainer

WINDOW = 8
SHAPES = {"embed": (257, 8), "blocks.up": (16, 8), "blocks.down": (8, 16), "blocks.gain": (8,)}


Hook = Callable[[Step], None]


class Watch:
    """Progress that calls a hook after each step."""

    def __init__(self, hook: Hook | None) -> None:
        self.hook = hook

    def __call__(self, step: Step, done: float) -> None:
        if self.hook is not None:
            self.hook(step)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(16, 8))
        self.down = nn.Parameter(torch.empty(8, 16))
        self.gain = nn.Parameter(torch.empty(8))


class Toy(nn.Module):
    """Next byte from this byte. Training adds noise from the global generator: resuming must restore it."""

    def __init__(self, noise: float = 0.01) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(257, 8))
        self.blocks = Blocks()
        self.noise = noise
        self.spoil: Callable[[Tensor], Tensor] = lambda loss: loss
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.5 * torch.randn(param.shape, generator=generator))

    def logits(self, ids: Tensor, noise: float) -> Tensor:
        x = F.embedding(ids, self.embed)
        x = x + noise * torch.randn_like(x) if noise else x
        h = torch.relu(x @ self.blocks.up.T) @ self.blocks.down.T
        return ((x + self.blocks.gain.to(x.dtype) * h) @ self.embed.T).float()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(ids, self.noise)
        return self.spoil(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids, 0.0).transpose(1, 2), targets, reduction="none")


def parameters(dtype: str = "f32") -> tuple[Parameter, ...]:
    return tuple(Parameter(name, shape, dtype, constant(0.0)) for name, shape in SHAPES.items())


def train_spec(**changes: Any) -> TrainSpec:
    data: dict[str, Any] = {
        "micro_batch": 2,
        "tokens_per_step": 4 * WINDOW,
        "steps": 20,
        "optimizers": (
            {
                "kind": "muon",
                "match": "blocks.{up,down}",
                "lr": 0.02,
                "momentum": {"at": ((0, 0.8), (10, 0.95)), "by": "step"},
                "weight_decay": 0.01,
            },
            {"kind": "adamw", "match": "embed", "lr": 0.02, "weight_decay": 0.1},
            {"kind": "adamw", "match": "*", "lr": 0.01},
        ),
        "schedule": {"warmup_steps": 3, "warmdown_steps": 10, "floor": 0.1},
        "clip_norm": 0.5,
        "average": {"kind": "ema", "decay": 0.9},
    }
    return TrainSpec.model_validate({**data, **changes})


def stream(folder: Path, split: str = "train") -> TokenStream:
    """About 9,000 tokens of text that can be learned."""
    source = folder / "text"
    source.mkdir(exist_ok=True)
    words = ["the cat", "a dog", "some fish", "eats", "sees", "the mouse", "!"]
    for name in ("train", "val"):
        text = "\n".join(" ".join(words[i * j % 7] for j in range(9)) for i in range(200))
        if not (source / f"{name}.txt").exists():
            (source / f"{name}.txt").write_text(text)
    return open_stream(source, split, ByteTokenizer(), folder / "cache")  # type: ignore[arg-type]


def trainer(
    folder: Path,
    train: TrainSpec | None = None,
    model: nn.Module | None = None,
    dtype: str = "f32",
    world: World | None = None,
    grids: Mapping[str, Scheme] | None = None,
) -> Trainer:
    """A trainer at step 0; equal arguments give equal trainers."""
    train, world = train or train_spec(), world or World.alone()
    torch.manual_seed(train.seed)
    loader = Loader(stream(folder), train.micro_batch, WINDOW, train.data.order, train.seed, world.rank, world.size)
    return Trainer(trainable(model or Toy(), dtype, grids), train, feed_of(train, loader, world=world.size), world)


def trainable(model: nn.Module, dtype: str = "f32", schemes: Mapping[str, Scheme] | None = None) -> TrainableModel:
    return TrainableModel(model, parameters(dtype), WINDOW, "digest", schemes=schemes)


def feed_of(train: TrainSpec, loader: Loader, window: int = WINDOW, world: int = 1) -> Windows:
    return Windows(loader, train.pass_tokens(window, world))
