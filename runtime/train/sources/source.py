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
    """The data to train on and the data to score on."""

    training: TrainingData
    validation: Validates


@dataclass(frozen=True, slots=True)
class Epoch:
    """The sizes of a set of pairs of lines.

    Attributes:
        samples: the samples per epoch.
        held_out: all pairs that are held out.
    """

    samples: int
    held_out: Pairs


class OpenData(Protocol):
    """Training data that have been opened."""

    @property
    def digests(self) -> DataDigests:
        """The digests of the content of both splits."""
        ...

    @property
    def epoch(self) -> Epoch | None:
        """The epoch of pairs of lines. None for other data."""
        ...

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        """Returns the data for this process. Resources to close are registered with `stack`."""
        ...

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yields `rows` rows of the training data, at most `batch` at once, as the inputs of the program `score`: name
        -> i64 tensor on the CPU.

        The rows are spread over the data. They depend only on the data, `rows`, `batch` and the spec's seed.
        """
        ...


class Ready(Protocol):
    @property
    def files(self) -> Sequence[Path]:
        """The files that a run copies, so that the run directory can be opened on its own."""
        ...

    def open(self, data: str, cache: Path, stack: ExitStack) -> OpenData:
        """Opens `data`, as given to `--data`. Results that are slow to compute are stored in `cache`. Raises DataError
        if the data cannot be read or do not fit the spec."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """The reader of one form of data.

    Attributes:
        name: the form, equal to `DataKind.gives`.
        ready: checks that everything needed is present and fits the model, before a run writes anything. Its arguments
            are a spec and folders to search for files. Raises DataError if something is missing or does not fit.
        drill: returns data for one process that only measures the speed of its steps: at least the given number of
            batches, from no file.
    """

    name: str
    ready: Callable[[Spec, Sequence[Path]], Ready]
    drill: Callable[[Spec, Loaded, int, ExitStack], TrainingData]


def source_of(spec: Spec) -> Source:
    """Returns the source of the data that the spec trains on."""
    known: Mapping[str, Source] = catalog(sources, Source)
    return known[spec.train.data.gives]
