"""What was measured before, so that a search that was cut off goes on where it stopped."""

import hashlib
import json
import os
from pathlib import Path

from platformdirs import user_cache_dir

from specc.compiler.lock import Machine


class Journal:
    """Results by candidate, for one node on one machine, in the user's cache directory (or SPECC_CACHE_DIR).

    A line a result; one that a killed search left half written counts for nothing.
    """

    def __init__(self, machine: Machine, site: str, rows: int) -> None:
        facts = json.dumps([machine.model_dump(), site, rows], sort_keys=True)
        folder = Path(os.environ.get("SPECC_CACHE_DIR") or user_cache_dir("specc"), "tune")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.jsonl"
        self.results: dict[str, float | str] = {}
        if self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    found = json.loads(line)
                    if isinstance(found["result"], float | str):
                        self.results[found["candidate"]] = found["result"]
                except (ValueError, KeyError, TypeError):
                    continue

    def add(self, candidate: str, result: float | str) -> None:
        """Keeps a time in ms, or a reason."""
        self.results[candidate] = result
        with self._path.open("a", encoding="utf-8") as file:  # a new line first: the last may be half a one
            file.write("\n" + json.dumps({"candidate": candidate, "result": result}))

    def forget(self) -> None:
        """Starts anew."""
        self.results.clear()
        self._path.unlink(missing_ok=True)
