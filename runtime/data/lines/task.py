"""The interface of tasks. A task generates line pairs, and measures the overlap of held-out pairs with the training
set.

A task is a subclass of `Task` in a module of this package. A spec selects a task by its name in `train.data.kind`. If
no task has the name, the data are read from files.
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
    """Lines of a task, in a representation that the task defines."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Self: ...

    @property
    def digest(self) -> str:
        """The SHA-256 (hex) of the lines."""


class LineStream(Protocol):
    """An endless stream of training lines. Streams with equal `identity` have equal lines."""

    @property
    def identity(self) -> str: ...

    def take(self, position: int, count: int) -> tuple[LineSet, int]:
        """Returns `count` lines of the stream from `position` on, and the position after the returned lines."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of a set of lines with the training set.

    Attributes:
        lines: the fraction of the lines that equal a training line, 0 to 1.
        structures: the fraction of the lines whose structure equals the structure of a training line, 0 to 1. The task
            defines the structure of a line.
        structure: the word for the structure in messages, such as `coefficients`.
    """

    lines: float
    structures: float
    structure: str

    def __str__(self) -> str:
        lines, structures = 100 * self.lines, 100 * self.structures
        return f"{lines:.1f} % of lines are training lines, {structures:.1f} % have {self.structure} of a training line"


Set = TypeVar("Set", bound=LineSet)


class Task(ABC, Generic[Set]):
    """Generates one kind of line pairs. `settings` are the fields of `train.data` in the spec.

    Attributes:
        name: the name of the task, which a spec gives as `train.data.kind`. The option `--data` also accepts the name.
        splits: the names of the held-out splits. The first split is used for validation during training, and has the
            distribution of the training lines.
    """

    name: ClassVar[str]
    splits: ClassVar[Sequence[str]]

    @abstractmethod
    def __init__(self, settings: Any) -> None:
        """Creates the task. `settings` is the field `train.data` of a spec."""

    @property
    @abstractmethod
    def training(self) -> Set:
        """The fixed training set. If training uses an endless stream of lines, the stream begins with this set."""

    @property
    @abstractmethod
    def fresh(self) -> bool:
        """Whether training uses an endless stream of new lines instead of the fixed set."""

    @abstractmethod
    def stream(self) -> LineStream:
        """Returns an endless stream of training lines, which omits the lines of the held-out splits."""

    @abstractmethod
    def first(self, count: int) -> Set:
        """Returns the first `count` training lines. `count` may exceed the size of the fixed training set."""

    @abstractmethod
    def held_out(self, split: str, count: int) -> Set:
        """Returns the first `count` lines of a held-out split.

        Raises DataError if the task has no split of this name, or cannot hold out `count` lines.
        """

    @abstractmethod
    def parse(self, sources: Sequence[str]) -> Set:
        """Parses source texts into lines. Raises DataError if a text is not a source line of the task."""

    @abstractmethod
    def overlap(self, lines: Set) -> Overlap:
        """Returns the overlap of `lines` with the fixed training set."""


def task_of(data: DataKind) -> Task[Any] | None:
    """Returns the task that generates the lines. Returns None if the lines are read from a file."""
    task: type[Task[Any]] | None = classes(lines, Task).get(data.kind)
    return task(data) if task is not None else None
