"""The interface of methods that adapt a model to the text that it scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.catalog import catalog
from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.runtime.data.windows.evaluation import Batch
from specc.runtime.distributed.world import World
from specc.runtime.errors import RuntimeFailure
from specc.runtime.eval import adapt
from specc.runtime.metrics.bits_per_byte import Account
from specc.runtime.metrics.share import Share
from specc.runtime.metrics.validation import Score


class AdaptError(RuntimeFailure):
    """The settings of a method do not fit the model."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Placed:
    """A Batch on the device: i64 and bool [B, T]."""

    ids: Tensor
    targets: Tensor
    new: Tensor
    seen: Tensor


@dataclass
class Work:
    """A model and the text to score. No parameter of the model takes a gradient, unless a method lets it.

    Attributes:
        account: takes the nats of each batch.
        score: nats of each target, f32 [B, T], of ids and targets, i64 [B, T]; without autograd.
        features: what the head reads, [B, T, D], of ids.
        nats: as `score`, of what the head reads, and targets.
        rows: at once.
        seed: of what starts at random.
    """

    account: Account
    model: nn.Module
    score: Score
    features: Callable[[Tensor], Tensor]
    nats: Callable[[Tensor, Tensor], Tensor]
    rows: int
    world: World
    seed: int
    progress: Callable[[int, int], None] | None = None
    _todo: int = field(init=False)

    def __post_init__(self) -> None:
        spans = [self.account.span(local) for chunk in self.account.chunks if (local := self.local_batches(chunk))]
        self._todo = sum(end - start for start, end in spans)

    @property
    def share(self) -> Share:
        """The part of this process."""
        return Share(self.world.rank, self.world.size, self.world.totals)

    def local_batches(self, batches: range) -> range:
        """The batches of a run that are local to this process."""
        part = self.share.of(len(batches))
        return batches[part.start : part.stop]

    def each(self, batches: range, nats: Callable[[Placed], Tensor]) -> None:
        """Counts `nats`, f32 [B, T], of each batch that is local to this process."""
        for number in self.local_batches(batches):
            batch = self.account.read(number)
            self.account.add(batch, nats(self._placed(batch)))
            if self.progress is not None:
                self.progress(self.account.tokens, self._todo)

    def _placed(self, batch: Batch) -> Placed:
        arrays = (batch.ids, batch.targets, batch.new, batch.seen)
        return Placed(*(torch.from_numpy(array.copy()).to(self.world.device) for array in arrays))


@dataclass(frozen=True, slots=True)
class Method:
    """A method of adaptation, named after the `kind` of its settings.

    Attributes:
        rows: windows of a batch, from the settings, where the windows of a batch share parameters; None for any number.
        chunk: targets that are scored before the model changes, from the settings; None where it does not change.
        run: scores the whole text, and returns in words how often it adapted. Several processes run it in one `world`.
    """

    name: str
    rows: Callable[[Any], int] | None
    chunk: Callable[[Any], int | None]
    run: Callable[[Any, Work], str]


def method_of(settings: Adaptation) -> Method:
    """The method that these settings are of."""
    known: Mapping[str, Method] = catalog(adapt, Method)
    return known[settings.kind]
