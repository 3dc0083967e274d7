"""Validation: the measurements of a model while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.metrics.bits_per_byte import BitsPerByte, ScoredText, evaluate_bits
from specc.runtime.metrics.share import Share

Score = Callable[[Tensor, Tensor], Tensor]


class Measured(Protocol):
    """A result: `nats` over all `tokens` targets, and the metric of the data."""

    @property
    def nats(self) -> float: ...
    @property
    def tokens(self) -> int: ...

    def record(self) -> Mapping[str, str | int | float | bool | None]:
        """The result as fields of a log."""
        ...

    def line(self) -> str:
        """The result as one line for people."""
        ...

    def summary(self) -> str:
        """The metric alone, with its unit."""
        ...


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model to measure, and the part of this process.

    Attributes:
        model: the model.
        score: the nats of each target, f32 [B, T], of (ids, targets) or (source, target), i64 on `device`.
        window: positions of a row.
        device: device of the model.
        share: the part of this process.
        progress: called between batches with the items scored and those in all.
        compiled: whether `score` is compiled; what else the measurement runs then is compiled too.
    """

    model: nn.Module
    score: Score
    window: int
    device: torch.device
    share: Share
    progress: Callable[[int, int], None] | None
    compiled: bool


class Validates(Protocol):
    """A set of data to score. `vocabulary` is the number of ids of its tokenizer."""

    @property
    def vocabulary(self) -> int: ...

    def measure(self, scorer: Scorer) -> Measured:
        """The result of all processes together. Raises DataError."""
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
        text = ScoredText(self.stream, self.tokenizer, self.max_tokens)
        plan = WindowPlan(scorer.window, self.batch)
        return evaluate_bits(scorer.score, text, plan, scorer.device, scorer.share, scorer.progress)
