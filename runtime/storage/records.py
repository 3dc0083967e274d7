"""Reads the log records of a run. Repeated steps and incomplete lines are removed."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Records:
    """The records of the log of a run, in order.

    A resumed run may repeat steps. A `start` record at step n therefore deletes all earlier records with steps greater
    than n.

    Attributes:
        all: the records.
        unreadable: the number of lines that are not records, such as the incomplete last line of a killed process.
    """

    all: tuple[Record, ...] = ()
    unreadable: int = 0

    @classmethod
    def read(cls, path: Path) -> "Records":
        """Reads a log. If the file is missing, there are no records."""
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return cls()
        records: list[Record] = []
        unreadable = 0
        for line in filter(None, lines):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("event"), str):
                unreadable += 1
                continue
            step = record.get("step")
            if record["event"] == "start" and is_number(step):
                records = [old for old in records if not is_number(old.get("step")) or old["step"] <= step]
            records.append(record)
        return cls(tuple(records), unreadable)

    def of(self, event: str, **fields: object) -> list[Record]:
        """Returns the records of an event, such as `validation`. In these records, all `fields` have the given
        values.
        """
        return [
            record
            for record in self.all
            if record["event"] == event and all(record.get(name) == value for name, value in fields.items())
        ]

    def last(self, event: str, **fields: object) -> Record:
        return next(iter(reversed(self.of(event, **fields))), {})

    def series(self, event: str, field: str, **fields: object) -> Sequence[tuple[float, float]]:
        """Returns a pair (step, value of `field`) for each record of an event with the given values of `fields`.

        Records in which the value of `field` is not a finite number are omitted.
        """
        records = self.of(event, **fields)
        return [(r["step"], r[field]) for r in records if is_number(r.get("step")) and is_number(r.get(field))]


def note_of_unreadable(log: object, count: int) -> str:
    return f"{log}: {count} lines are not valid records; an interrupted run may leave one"


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
