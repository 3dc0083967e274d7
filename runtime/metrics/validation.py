"""Validation: measurements of a model during training."""

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
    """The result of a validation. The field `nats` is the sum of the losses of `tokens` targets."""

    @property
    def nats(self) -> float: ...
    @property
    def tokens(self) -> int: ...

    def record(self) -> Mapping[str, str | int | float | bool | None]:
        """Returns the result as fields of a log record."""

    def line(self) -> str:
        """Returns the result as one human-readable line."""

    def summary(self) -> str:
        """Returns the value of the metric with its unit, without the loss."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model to measure, with the settings of the measurement.

    Attributes:
        model: the model.
        score: maps (ids, targets) or (source, target), i64 on `device`, to the loss of each target in nats, f32 [B, T].
        window: the length of a row in tokens.
        device: the device of the model.
        share: the part of the data that this process scores.
        progress: a function that is called between batches as `progress(scored, total)`.
        compiled: whether `score` is compiled. The measurement then also compiles all other functions that it runs.
    """

    model: nn.Module
    score: Score
    window: int
    device: torch.device
    share: Share
    progress: Callable[[int, int], None] | None
    compiled: bool


class Validates(Protocol):
    """A data set to score. `vocabulary` is the number of ids of the tokenizer."""

    @property
    def vocabulary(self) -> int: ...

    def measure(self, scorer: Scorer) -> Measured:
        """Scores the data, and returns the result over all processes.

        Raises DataError if the data cannot be read or scored.
        """


@dataclass(frozen=True, slots=True)
class Validation:
    """Measures the loss on the first `max_tokens` targets of a text stream. If `max_tokens` is None, measures the loss
    on all targets.

    A batch has `batch` windows. In every window, the first `unscored` targets serve only as context.
    """

    stream: TokenStream
    tokenizer: Tokenizer
    batch: int
    max_tokens: int | None
    unscored: int = 0

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocab

    def measure(self, scorer: Scorer) -> BitsPerByte:
        text = ScoredText(self.stream, self.tokenizer, self.max_tokens)
        plan = WindowPlan(scorer.window, self.batch, unscored=self.unscored)
        return evaluate_bits(scorer.score, text, plan, scorer.device, scorer.share, scorer.progress)
