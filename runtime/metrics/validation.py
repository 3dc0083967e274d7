"""What a model is scored on while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.metrics.bits_per_byte import BitsPerByte, Sums, evaluate_bits

Score = Callable[[Tensor, Tensor], Tensor]


class Measured(Protocol):
    """What came out: `nats` in all over `tokens` targets, and the metric of the data."""

    @property
    def nats(self) -> float: ...
    @property
    def tokens(self) -> int: ...

    def record(self) -> Mapping[str, str | int | float | bool | None]:
        """For a log."""
        ...

    def line(self) -> str:
        """For people."""
        ...

    def summary(self) -> str:
        """The metric alone, with its unit."""
        ...


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model to measure, and this process's part of the work.

    Attributes:
        score: the nats of each target, f32 [B, T], of (ids, targets) or (source, target), i64 on `device`.
        window: positions of a row.
        progress: called between batches with what is done and what is to do.
        rank, world, reduce: `reduce` sums small float64 arrays over all ranks.
        compiled: whether `score` is, and what else the measure runs should be.
    """

    model: nn.Module
    score: Score
    window: int
    device: torch.device
    progress: Callable[[int, int], None] | None
    rank: int
    world: int
    reduce: Callable[[Sums], Sums]
    compiled: bool


class Validates(Protocol):
    """Something to score. `vocabulary` is how many ids its tokenizer has."""

    @property
    def vocabulary(self) -> int: ...

    def measure(self, scorer: Scorer) -> Measured:
        """The result is that of all ranks together. Raises DataError."""
        ...


@dataclass(frozen=True, slots=True)
class Validation:
    """The first `max_tokens` of a stream of text (None: all of it), `batch` windows at once."""

    stream: TokenStream
    tokenizer: Tokenizer
    batch: int
    max_tokens: int | None

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocab

    def measure(self, scorer: Scorer) -> BitsPerByte:
        return evaluate_bits(
            scorer.score,
            self.stream,
            self.tokenizer,
            scorer.window,
            self.batch,
            scorer.device,
            max_tokens=self.max_tokens,
            progress=scorer.progress,
            rank=scorer.rank,
            world=scorer.world,
            reduce=scorer.reduce,
        )
