"""The journal of measured results. After an interruption, a search resumes from the journal."""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from platformdirs import user_cache_dir

from specc.compiler.plan.lock import Machine
from specc.runtime.support.native import FLAGS, find_cutlass, find_nvcc, nvcc_version
from specc.runtime.tune.candidates import Candidate

# The version of the accuracy check. A stricter check needs a new version, which invalidates earlier results.
JUDGED = 3


def folder() -> Path:
    """Returns the folder with the results of searches, and creates it if it does not exist.

    The folder is `tune` in SPECC_CACHE_DIR. If this environment variable is unset, the folder is in the user's cache
    directory.
    """
    path = Path(os.environ.get("SPECC_CACHE_DIR") or user_cache_dir("specc"), "tune")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def key(candidate: Candidate) -> str:
    """Returns the key under which the journal stores the result of a candidate.

    The key is a digest of the code of the candidate, and of the versions of the tools that compile the code. For CUDA
    C++, the tools are nvcc with its flags, and CUTLASS. Raises EnvironmentFailure if the compiler is missing.
    """
    facts = [candidate.digest]
    if candidate.source is not None:
        facts += [nvcc_version(find_nvcc()), find_cutlass()[0], *FLAGS]
    if candidate.kernel.package:
        facts.append(_installed(candidate.kernel.package))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class Journal:
    """The stored results of candidates for one node, one machine and one version of the accuracy check.

    The key of a result is the `key` of the candidate. The file has one line per result. A line that an interrupted
    search left incomplete is ignored.
    """

    def __init__(self, machine: Machine, site: str, rows: int) -> None:
        # The key of a candidate already contains the versions of these packages, if the candidate needs the packages
        compilers = {"nvcc", "cutlass"}
        facts = json.dumps([machine.model_dump(exclude=compilers), site, rows, JUDGED], sort_keys=True)
        self._path = folder() / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.jsonl"
        self.results: dict[str, float | str] = {}
        if self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    if isinstance(entry["result"], float | str):
                        self.results[entry["candidate"]] = entry["result"]
                except (ValueError, KeyError, TypeError):
                    continue

    def add(self, candidate: str, result: float | str) -> None:
        """Stores the result of a candidate: its time in ms, or the reason for its rejection."""
        self.results[candidate] = result
        with self._path.open(
            "a", encoding="utf-8"
        ) as file:  # begins with a newline, because the last line may be incomplete
            file.write("\n" + json.dumps({"candidate": candidate, "result": result}))

    def forget(self) -> None:
        self.results.clear()
        self._path.unlink(missing_ok=True)
