"""Tasks: generated pairs of lines, with held-out splits and a measure of their overlap with the training set.

A task is a subclass of `Task` in a module of this package. Its `name` is the `kind` of `train.data`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from specc.compiler.catalog import classes
from specc.compiler.spec.data.kind import DataKind
from specc.runtime.data import lines
from specc.runtime.data.lines.pairs import TextPairs


class LineSet(TextPairs, Protocol):
    """Lines of a task, in the representation of that task."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Self: ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the lines."""


class LineStream(Protocol):
    """An endless stream of training lines. `identity` is a string that contains all values that determine the lines."""

    @property
    def identity(self) -> str: ...

    def take(self, position: int, count: int) -> tuple[LineSet, int]:
        """Returns `count` lines that start at a position, and the position after them. The stream begins at 0."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many lines of a set are also in the training set.

    Attributes:
        lines: the fraction of the lines that equal a training line, 0 to 1.
        structures: the fraction of the lines that have the same structure as a training line, 0 to 1.
        structure: human-readable name of the structure, such as `coefficients`.
    """

    lines: float
    structures: float
    structure: str

    def __str__(self) -> str:
        lines, structures = 100 * self.lines, 100 * self.structures
        return f"{lines:.1f} % of lines are training lines, {structures:.1f} % have {self.structure} of one"


Set = TypeVar("Set", bound=LineSet)


class Task(ABC, Generic[Set]):
    """A generator of one kind of line data, with the settings of a spec.

    Attributes:
        name: the `kind` of `train.data`, which `--data` also accepts.
        splits: the names of the held-out splits. The first has the same distribution as training lines, and is used for
            validation during training.
    """

    name: ClassVar[str]
    splits: ClassVar[Sequence[str]]

    @abstractmethod
    def __init__(self, settings: Any) -> None:
        """Creates the task from the `train.data` of a spec."""

    @property
    @abstractmethod
    def training(self) -> Set:
        """The fixed training set. If training draws fresh lines, their stream begins with this set."""

    @property
    @abstractmethod
    def fresh(self) -> bool:
        """Whether training draws from an endless stream of new lines instead of the fixed set."""

    @abstractmethod
    def stream(self) -> LineStream:
        """Returns an endless stream of training lines, which omits lines that are reserved for held-out splits."""

    @abstractmethod
    def first(self, count: int) -> Set:
        """Returns the first `count` training lines, for any `count`."""

    @abstractmethod
    def held_out(self, split: str, count: int) -> Set:
        """Returns the first `count` lines of a held-out split.

        Raises DataError if the task does not have the split, or cannot hold out that many lines.
        """

    @abstractmethod
    def parse(self, sources: Sequence[str]) -> Set:
        """Parses source texts into lines. Raises DataError if a text is not a source of the task."""

    @abstractmethod
    def overlap(self, lines: Set) -> Overlap:
        """Returns the overlap of `lines` with the fixed training set."""


def task_of(data: DataKind) -> Task[Any]:
    """Creates the task of a spec's `train.data`."""
    task: Task[Any] = classes(lines, Task)[data.kind](data)
    return task
