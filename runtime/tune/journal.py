"""What was measured before, so that a search that was cut off goes on where it stopped."""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from platformdirs import user_cache_dir

from specc.compiler.plan.lock import Machine
from specc.runtime.support.native import FLAGS, find_cutlass, find_nvcc, nvcc_version
from specc.runtime.tune.candidates import Candidate

JUDGED = 3  # one more whenever candidates are judged more strictly: what passed before may not pass now


def folder() -> Path:
    """Where searches keep what they know: `tune/` of the user's cache directory (or of SPECC_CACHE_DIR)."""
    found = Path(os.environ.get("SPECC_CACHE_DIR") or user_cache_dir("specc"), "tune")
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def key(candidate: Candidate) -> str:
    """What a result holds for: the code, and what else makes or computes it. That is nvcc with its flags and CUTLASS
    where there is CUDA C++, and a library's package where that is no part of Torch. Raises EnvironmentFailure without
    the compiler of a candidate."""
    facts = [candidate.digest]
    if candidate.source is not None:
        facts += [nvcc_version(find_nvcc()), find_cutlass()[0], *FLAGS]
    kernel = candidate.kernel
    if kernel.package:
        facts.append(_installed(kernel.package))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class Journal:
    """Results by the `key` of a candidate, for one node on one machine and under one judge.

    A line a result; one that a killed search left half written counts for nothing.
    """

    def __init__(self, machine: Machine, site: str, rows: int) -> None:
        compilers = {"nvcc", "cutlass"}  # which are part of a candidate's key where it needs them
        facts = json.dumps([machine.model_dump(exclude=compilers), site, rows, JUDGED], sort_keys=True)
        self._path = folder() / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.jsonl"
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
