"""The interface of a kind of training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from specc.compiler.catalog import catalog
from specc.compiler.spec.spec import Spec
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.distributed.world import World
from specc.runtime.metrics.validation import Validates
from specc.runtime.model.load import Loaded
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.train import sources
from specc.runtime.train.sources.feed import TrainingData


@dataclass(frozen=True, slots=True)
class Supply:
    """Data to train on and to score on."""

    training: TrainingData
    validation: Validates


@dataclass(frozen=True, slots=True)
class Epoch:
    """Pairs of lines: how many `samples` an epoch trains on, and all that are held out."""

    samples: int
    held_out: Pairs


class OpenData(Protocol):
    """Data that are open."""

    @property
    def digests(self) -> DataDigests:
        """Of the content of both splits."""
        ...

    @property
    def epoch(self) -> Epoch | None:
        """None for data that are no pairs of lines."""
        ...

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        """For this process; what has to be closed is left to `stack`."""
        ...

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        """`rows` rows of the training data, at most `batch` at once, as the inputs of the program `score` by name, i64
        on the CPU. They are spread over the data and depend on it, on the numbers and on the spec's seed alone."""
        ...


class Ready(Protocol):
    @property
    def files(self) -> Sequence[Path]:
        """The files that a run copies, so that it can be opened where nothing but the run is."""
        ...

    def open(self, data: str, cache: Path, stack: ExitStack) -> OpenData:
        """Opens `data`, as `--data` names it. What takes long is made once, in `cache`. Raises DataError."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """How one form of data is read.

    Attributes:
        name: the form, as `DataKind.gives` states it.
        ready: finds all that is needed to be there and to fit the model, before a run writes anything: of a spec and
            folders to look for files in. It raises DataError.
        drill: data for one process where only the speed of its steps counts: at least so many batches, from no file.
    """

    name: str
    ready: Callable[[Spec, Sequence[Path]], Ready]
    drill: Callable[[Spec, Loaded, int, ExitStack], TrainingData]


def source_of(spec: Spec) -> Source:
    """The source of the data that the spec trains on."""
    known: Mapping[str, Source] = catalog(sources, Source)
    return known[spec.train.data.gives]
