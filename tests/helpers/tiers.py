"""Tests in two tiers: a few trials in `make test`, the promised numbers in `make soak`.

    @tiers("C21", flips=(500, 10_000))
    def test_flips(trials: Trials) -> None: ... trials["flips"] ...

Such a test may stand in any folder of tests, and is not parametrized otherwise: it has one result. The fixture `trials`
is in conftest.py. docs/generate.py reads the numbers from the source, and the results of `make soak` from
docs/promises.json. `SPECC_SOAK_SHARE` scales the numbers of `make soak`; what was run is recorded. A promise with a
result of today, of the same sources and of at least as many trials, is not run again, unless `SPECC_SOAK_AGAIN` is set.
A test that is skipped has no result. Tests with the marker `gpu` run in `make soak-gpu`.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
RESULTS = TESTS.parent / "docs" / "promises.json"
SHARE = float(os.environ.get("SPECC_SOAK_SHARE", "1"))
# The folders that a result depends on
SOURCES = ("benchmarks", "compiler", "runtime", "cli", "templates", "specs", "tests")
FEW = 9  # such a number is one of kinds, which is not scaled
Trials = Mapping[str, int]


def tiers(promise: str, **numbers: tuple[int, int]) -> Callable[[Any], Any]:
    """Runs a test twice: with the first numbers in `make test`, and with the second in `make soak`."""
    few = {name: quick for name, (quick, _) in numbers.items()}
    many = {name: full if full <= FEW else max(quick, round(full * SHARE)) for name, (quick, full) in numbers.items()}
    parameters = [
        pytest.param((promise, few), id="quick"),
        pytest.param((promise, many), id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ]
    return pytest.mark.parametrize("trials", parameters, indirect=True)


def soak(promise: str, **numbers: int) -> Callable[[Any], Any]:
    """Runs a test in `make soak` only: what it repeats is also a test of its own in `make test`."""
    many = {name: full if full <= FEW else max(1, round(full * SHARE)) for name, full in numbers.items()}
    marks = [pytest.mark.soak, pytest.mark.timeout(0)]
    return pytest.mark.parametrize("trials", [pytest.param((promise, many), id="soak", marks=marks)], indirect=True)


def results() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return loaded


@cache
def sources() -> str:
    """Returns a digest of the names and contents of all source files."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((TESTS.parent / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(TESTS.parent).as_posix()}\n{path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def done_today(test: str, trials: Trials) -> bool:
    """Returns whether a test of the same sources passed today with at least as many trials."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return "SPECC_SOAK_AGAIN" not in os.environ and any(
        result["test"] == test
        and result["date"] == today
        and result["passed"]
        and result.get("sources") == sources()
        and all(result["trials"].get(name, 0) >= number for name, number in trials.items())
        for result in results()
    )


def rounds_left(notes: pytest.Cache, test: str, rounds: Sequence[str]) -> Iterator[str]:
    """Yields the rounds of a long test that have not passed today with the same sources. Notes each round when the next
    is asked for.

    A `make soak` that was stopped goes on with the round that it stopped in. `rounds` are the names of the rounds.
    """
    key, today = f"specc/{test}", time.strftime("%Y-%m-%d", time.gmtime())
    noted = notes.get(key, {})
    facts = {"date": today, "sources": sources()}
    same = facts.items() <= noted.items() and "SPECC_SOAK_AGAIN" not in os.environ
    passed = noted["rounds"] if same else []
    for name in rounds:
        if name not in passed:
            yield name
            passed = [*passed, name]
            notes.set(key, {**facts, "rounds": passed})


def machine(gpu: bool) -> str:
    """Returns the machine in words, with its GPU for tests that run on one."""
    words = [f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"]
    if gpu:
        import torch

        words.insert(0, torch.cuda.get_device_name())
    return ", ".join(words)


def record(promise: str, test: str, trials: Trials, seconds: float, passed: bool, gpu: bool = False) -> str:
    """Adds a result to docs/promises.json, in place of an earlier one of the same test, and returns it as a line.

    Args:
        promise: the name of the promise.
        test: the file of the test, from the folder of tests, and its function: `promises/test_sizes.py::test_a`.
        trials: the numbers of trials that were run.
        seconds: the duration in seconds.
        passed: whether the test passed.
        gpu: whether the test ran on a GPU, which is then recorded.

    Returns:
        The result in one line.
    """
    line = {
        "promise": promise,
        "test": test,
        "trials": dict(trials),
        "passed": passed,
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(gpu),
        "sources": sources(),
    }
    others = [result for result in results() if result["test"] != test]
    ordered = sorted([*others, line], key=lambda result: (int(result["promise"][1:]), result["test"]))
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(f" {json.dumps(result)}" for result in ordered) + "\n]\n")
    temporary.replace(RESULTS)
    ran = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in trials.items())
    return f"{promise:<4} {'kept' if passed else 'BROKEN'}  {ran}  {seconds:.1f} s  {test}"
