"""The interface of a kind of training data."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from specc.compiler.catalog import classes
from specc.compiler.spec.spec import Spec
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.distributed.world import World
from specc.runtime.metrics.validation import Validates
from specc.runtime.model.load import Loaded
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.train import sources
from specc.runtime.train.sources.feed import Feed


@dataclass(frozen=True, slots=True)
class Supply:
    """The training data and the validation data of a run."""

    feed: Feed
    validation: Validates


@dataclass(frozen=True, slots=True)
class Epoch:
    """The sizes of a set of line pairs.

    Attributes:
        samples: the number of samples per epoch.
        held_out: the pairs that are held out for validation.
    """

    samples: int
    held_out: Pairs


class OpenData(Protocol):
    """Opened training data."""

    @property
    def digests(self) -> DataDigests:
        """The digests of both splits."""

    @property
    def epoch(self) -> Epoch | None:
        """The sizes of an epoch, for data that are line pairs. None for other data."""

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        """Returns the data for this process, and registers the resources to close with `stack`."""

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yields `rows` rows of the training data in batches of at most `batch` rows. A batch has the inputs of the
        program `score` by name, as i64 tensors on the CPU.

        The rows are spread over the data. They depend only on the data, `rows`, `batch` and the spec's seed.
        """


class Source(ABC):
    """The reader of one form of data. Each subclass reads one form and is a file of this package.

    Before a run writes anything, the constructor checks that all files are present and match the model.

    Args:
        spec: the resolved spec.
        search: the folders to search for files.

    Attributes:
        name: the form, equal to `DataKind.gives`.
        files: the files that a run copies, so that the run directory can be opened on its own.

    Raises:
        DataError: if a file is missing or does not match the model.
    """

    name: ClassVar[str]
    files: Sequence[Path] = ()

    @abstractmethod
    def __init__(self, spec: Spec, search: Sequence[Path]) -> None: ...

    @abstractmethod
    def open(self, data: str, cache: Path, stack: ExitStack) -> OpenData:
        """Opens `data`, as given to `--data`. The folder `cache` stores results that are slow to compute. Raises
        DataError if the data cannot be read or do not fit the spec."""

    @staticmethod
    @abstractmethod
    def drill(spec: Spec, loaded: Loaded, batches: int, stack: ExitStack) -> Feed:
        """Returns the feed of a process that only measures the speed of training steps. No file is read.

        Args:
            spec: the spec.
            loaded: the loaded model.
            batches: the minimum number of batches that the feed must provide.
            stack: the exit stack that closes the feed.
        """


def source_of(spec: Spec) -> type[Source]:
    """Returns the source for the data on which the spec trains."""
    kinds: Mapping[str, type[Source]] = classes(sources, Source)
    return kinds[spec.train.data.gives]
