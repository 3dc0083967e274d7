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
    """Raised if the settings of an adaptation method do not match the model."""

    code = "U010"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Placed:
    """The tensors of a `Batch` on the device of the model: `ids` and `targets`, i64 [B, T], and `new` and `seen`, bool
    [B, T].
    """

    ids: Tensor
    targets: Tensor
    new: Tensor
    seen: Tensor


@dataclass
class Work:
    """A model, and the text to score with the model. The parameters require no gradients until a method enables them.

    Attributes:
        account: the account that reads batches of the text, and accumulates their losses.
        model: the model.
        score: a function that maps ids and targets, i64 [B, T], to the loss of each target in nats, f32 [B, T]. The
            function runs without autograd.
        features: a function that maps ids to the input of the output head, [B, T, features].
        nats: a function that maps the input of the head and targets to the loss of each target in nats, f32 [B, T].
        rows: the number of rows per batch.
        world: the processes that share the work.
        seed: the seed of random initial values.
        progress: is called as `progress(scored, total)`. `scored` is the number of targets that this process has
            scored. `total` is the number of targets that this process must score.
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
        name: the name of the method, which is the `kind` of its settings.
        rows: a function that maps the settings to the required number of windows per batch. The result is None if the
            method allows any number.
        chunk: a function that maps the settings to the number of targets that are scored between two changes of the
            model. The result is None if the method does not change the model.
        run: a function that scores the whole text, and returns a message about the number of adaptations. All processes
            call this function.
    """

    name: str
    rows: Callable[[Any], int] | None
    chunk: Callable[[Any], int | None]
    run: Callable[[Any, Work], str]


def method_of(settings: Adaptation) -> Method:
    known: Mapping[str, Method] = catalog(adapt, Method)
    return known[settings.kind]
