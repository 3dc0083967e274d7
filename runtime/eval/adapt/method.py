"""The interface of methods of test-time adaptation."""

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
    """Raised if the settings of an adaptation method do not fit the model."""

    code = "U010"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Placed:
    """The tensors of a `Batch` on the device: `ids` and `targets` i64 [B, T], `new` and `seen` bool [B, T]."""

    ids: Tensor
    targets: Tensor
    new: Tensor
    seen: Tensor


@dataclass
class Work:
    """A model, and the text to score with it. Parameters require no gradients until a method enables them.

    Attributes:
        account: accumulates the losses of all batches.
        model: the model.
        score: maps ids and targets, i64 [B, T], to the loss of each target in nats, f32 [B, T]. Runs without autograd.
        features: maps ids to the input of the output head, [B, T, features].
        nats: maps the input of the head, and targets, to the loss of each target in nats, f32 [B, T].
        rows: the number of rows per batch.
        world: the processes that share the work.
        seed: the seed of random initial values.
        progress: is called as `progress(scored, total)`, with the numbers of targets of this process.
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
        return Share(self.world.rank, self.world.size, self.world.totals)

    def local_batches(self, batches: range) -> range:
        part = self.share.of(len(batches))
        return batches[part.start : part.stop]

    def each(self, batches: range, nats: Callable[[Placed], Tensor]) -> None:
        """Calls `nats` for each batch that this process scores, and adds the result, f32 [B, T], to the account."""
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
    """A method of test-time adaptation.

    Attributes:
        name: the `kind` of the settings.
        rows: maps the settings to the required number of windows per batch. None if any number is possible.
        chunk: maps the settings to the number of targets that are scored between changes of the model. None if the
            model does not change.
        run: scores the whole text, and returns a message about the number of adaptations. All processes call `run`.
    """

    name: str
    rows: Callable[[Any], int] | None
    chunk: Callable[[Any], int | None]
    run: Callable[[Any, Work], str]


def method_of(settings: Adaptation) -> Method:
    known: Mapping[str, Method] = catalog(adapt, Method)
    return known[settings.kind]
