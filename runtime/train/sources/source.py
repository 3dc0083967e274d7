"""The interface of readers of training data."""

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
    """One epoch of line pairs.

    Attributes:
        samples: the number of samples per epoch.
        held_out: the pairs that are held out for validation.
    """

    samples: int
    held_out: Pairs


class OpenData(Protocol):
    """The opened training data and validation data of a run."""

    @property
    def digests(self) -> DataDigests:
        """The digests of the training split and the validation split."""

    @property
    def epoch(self) -> Epoch | None:
        """The properties of an epoch if the data are line pairs; None for other data."""

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        """Returns the data with which this process trains `loaded`. `stack` closes the resources of the data."""

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yields `rows` rows of the training data for calibration, in batches of at most `batch` rows.

        A batch maps the names of the inputs of the program `score` to i64 tensors on the CPU. The rows are spread over
        the data. The choice of the rows depends only on the arguments, the data and the seed of the spec.
        """


class Source(ABC):
    """The reader of one form of data, such as text or lines.

    Each subclass is in a separate file of this package. Before a run writes anything, the constructor checks that all
    files exist and match the model.

    Args:
        spec: the resolved spec.
        search: the folders to search for files, for example for the tokenizer.

    Attributes:
        name: the name of the form of the data, as in `DataKind.gives`.
        files: the files to copy into the run directory, so that the run does not depend on files elsewhere.

    Raises:
        DataError: if a file is missing or does not match the model.
    """

    name: ClassVar[str]
    files: Sequence[Path] = ()

    @abstractmethod
    def __init__(self, spec: Spec, search: Sequence[Path]) -> None: ...

    @abstractmethod
    def open(self, data: str, cache: Path, stack: ExitStack) -> OpenData:
        """Opens `data`, the value of the option `--data`.

        The folder `cache` stores results that are slow to compute. Raises DataError if the data cannot be read or do
        not match the spec.
        """

    @staticmethod
    @abstractmethod
    def drill(spec: Spec, loaded: Loaded, batches: int, stack: ExitStack) -> Feed:
        """Returns a feed of random batches, with which the speed of training steps is measured. Reads no files.

        Args:
            spec: the spec.
            loaded: the loaded model.
            batches: the minimum number of batches that the feed must provide.
            stack: the exit stack that closes the resources of the feed.
        """


def source_of(spec: Spec) -> type[Source]:
    """Returns the source class for the data of a spec."""
    kinds: Mapping[str, type[Source]] = classes(sources, Source)
    return kinds[spec.train.data.gives]
