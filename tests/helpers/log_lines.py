"""The lines of the log of a run."""

import json
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, in order, without lines that a kill cut and without what a resume took back:
    after a start at step n, earlier records of later steps do not count."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["event"] == "start":
            records = [old for old in records if old.get("step", 0) <= record["step"]]
        records.append(record)
    return records


def read_start(path: Path) -> dict[str, Any]:
    """The first record of the start of training."""
    return next(record for record in read_log(path) if record["event"] == "start")
