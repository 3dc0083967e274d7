"""The interface of trackers, and the numbers that they receive."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        directory: the run directory.
        project: the name of the spec.
        digest: SHA-256 (hex) of the canonical spec.
        config: the resolved spec as data.
        step: the step after which training begins: 0, or the step of the checkpoint from which the run resumes.
    """

    directory: Path
    project: str
    digest: str
    config: Mapping[str, Any]
    step: int = 0


class Tracker(ABC):
    """The interface of a tracker, which receives the records of a run. Only the process that writes the log creates and
    calls trackers.

    Attributes:
        name: the value of `specc train --track`.
        package: the package that the tracker needs. The package is imported when the tracker starts.
        extra: the extra of specc that installs this package.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Starts the tracker."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Receives the numbers of a record. Their names are, for example, `step/loss`."""

    @abstractmethod
    def close(self) -> None:
        """Writes all remaining records and ends the tracker."""


def numbers_of(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record of the log, by name.

    Names are `event/field`, or `event/weights/field` if the record is about plain or averaged weights. The load of
    experts is reported per layer, as the largest share divided by the mean share.

    Args:
        event: the event of the record.
        values: the fields of the record.
    """
    weights = values.get("weights")
    start = f"{event}/{weights}" if isinstance(weights, str) else event
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            numbers[f"{start}/{name}"] = float(value)
        elif isinstance(value, Mapping):
            for layer, load in value.items():
                number = load if isinstance(load, int | float) else len(load) * max(load)
                numbers[f"{start}/{layer}"] = float(number)
    return numbers
