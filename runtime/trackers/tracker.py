"""The interface of trackers, and the values that they receive."""

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
        digest: the SHA-256 (hex) of the spec.
        config: the spec as data, with all defaults.
        step: the step at which training begins: 0, or the step of the checkpoint from which the run resumes.
    """

    directory: Path
    project: str
    digest: str
    config: Mapping[str, Any]
    step: int = 0


class Tracker(ABC):
    """The interface of a tracker, which receives the log records of a run in the process that writes the log.

    Attributes:
        name: the value of `specc train --track` that selects the tracker.
        package: the name of the Python package that the tracker needs. The tracker imports this package when it starts.
        extra: the optional dependency group of specc that installs this package.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Starts the tracker."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Receives the numeric values of a log record, by name. An example of a name is `step/loss`."""

    @abstractmethod
    def close(self) -> None:
        """Writes all remaining records and ends the tracker."""


def numbers_of(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numeric values of a log record, by name.

    A name is `event/field`, or `event/weights/field` if the record has a field `weights`. For the loads of the experts
    of a layer, the result has a single value: the ratio of the largest load to the mean load.

    Args:
        event: the name of the event, such as `step`.
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
