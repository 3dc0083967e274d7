"""Tasks: data of lines that specc generates, with held-out splits and a measure of overlap.

A task is one subclass of `Task` in a module of this package, found by the `kind` of `train.data`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from specc.compiler.catalog import classes
from specc.compiler.spec.data.kind import DataKind
from specc.runtime.data import lines
from specc.runtime.data.lines.pairs import TextPairs


class LineSet(TextPairs, Protocol):
    """Lines of one task, in the task's own representation."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Self: ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the lines."""
        ...


class LineStream(Protocol):
    """Training lines without end. `identity` states in words all that decides them."""

    @property
    def identity(self) -> str: ...

    def take(self, position: int, count: int) -> tuple[LineSet, int]:
        """The next `count` lines from a position on, and the position behind them; the first is at 0."""
        ...


@dataclass(frozen=True, slots=True)
class Overlap:
    """The share of lines that stand in the training set.

    Attributes:
        lines: share of the lines that are equal to a training line, 0 to 1.
        structures: share of the lines whose structure is that of a training line, 0 to 1.
        structure: the name of a structure, for people, such as `coefficients`.
    """

    lines: float
    structures: float
    structure: str

    def __str__(self) -> str:
        lines, structures = 100 * self.lines, 100 * self.structures
        return f"{lines:.1f} % of the lines are in the training set, {structures:.1f} % by {self.structure}"


Set = TypeVar("Set", bound=LineSet)


class Task(ABC, Generic[Set]):
    """The lines of one kind of generated data, with the settings of a spec.

    Attributes:
        name: the `kind` of `train.data`; `--data` takes it too.
        splits: names of the held-out splits. The first is drawn as training lines are, and validates a run.
    """

    name: ClassVar[str]
    splits: ClassVar[Sequence[str]]

    @abstractmethod
    def __init__(self, settings: Any) -> None:
        """Takes the `train.data` of a spec."""

    @property
    @abstractmethod
    def training(self) -> Set:
        """The fixed training set; where training draws fresh lines, the set that they begin with."""

    @property
    @abstractmethod
    def fresh(self) -> bool:
        """Whether training draws new lines for ever, and not from the fixed set."""

    @abstractmethod
    def stream(self) -> LineStream:
        """Training lines without end, without those that held-out splits have to themselves."""

    @abstractmethod
    def first(self, count: int) -> Set:
        """The first `count` lines that training draws, of any number."""

    @abstractmethod
    def held_out(self, split: str, count: int) -> Set:
        """The first `count` lines of a held-out split. Raises DataError for a split that the task does not have, or
        more lines than it can hold out."""

    @abstractmethod
    def parse(self, sources: Sequence[str]) -> Set:
        """The lines of these sources. Raises DataError for a text that is no source of the task."""

    @abstractmethod
    def overlap(self, lines: Set) -> Overlap:
        """The share of `lines` that is in the fixed training set."""


def task_of(data: DataKind) -> Task[Any]:
    """The task that a spec's `train.data` names."""
    task: Task[Any] = classes(lines, Task)[data.kind](data)
    return task
