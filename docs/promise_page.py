"""The page docs/promises.md: every promise, its tests with their numbers, and the last results of `make soak`.

The words are in promises.toml, the numbers of tests in two tiers in their sources, the results in promises.json.
"""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
INTRO = """# Promises

What specc promises, and how often it is tested. `make test` runs a few trials of each promise. `make soak` runs the
full numbers, which takes hours, and writes its results to `docs/promises.json`; a run that was stopped goes on where it
was on the same day. `make soak-gpu` does the same with the promises that need an NVIDIA GPU. `SPECC_SOAK_SHARE=0.1 make
soak` runs a tenth of the trials. A result states what was run.
"""


@dataclass(frozen=True)
class TieredTest:
    """A test with its numbers of trials in `make test` (none if it does not run there) and in `make soak`, or `make
    soak-gpu` if it needs a GPU."""

    promise: str
    name: str
    few: Mapping[str, int] | None
    many: Mapping[str, int]
    gpu: bool


def tiered_tests() -> Iterator[TieredTest]:
    """Yields the tests that `tiers` or `soak` decorates, from their sources."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if "from tiers import" not in (text := path.read_text()):
            continue
        body = ast.parse(text).body
        whole = any(
            isinstance(line, ast.Assign)
            and ast.unparse(line).startswith("pytestmark = ")
            and "mark.gpu" in ast.unparse(line)
            for line in body
        )
        for function in body:
            if not isinstance(function, ast.FunctionDef):
                continue
            gpu = whole or any(ast.unparse(mark) == "pytest.mark.gpu" for mark in function.decorator_list)
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("tiers", "soak"):
                    (promise,) = map(ast.literal_eval, call.args)
                    numbers = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                    two = call.func.id == "tiers"
                    few = {name: value[0] for name, value in numbers.items()} if two else None
                    many = {name: value[1] for name, value in numbers.items()} if two else numbers
                    name = f"{path.relative_to(TESTS).as_posix()}::{function.name}"
                    yield TieredTest(promise, name, few, many, gpu)


def require_exists(test: str) -> None:
    """Raises ValueError unless a file, or a test in it, exists."""
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text()):
        raise ValueError(f"docs/promises.toml names {test}, which does not exist")


def listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in numbers.items())


def result_line(test: TieredTest, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The last result of a test in words."""
    result = results.get(test.name)
    if result is None:
        return "not run yet"
    outcome = "kept" if result["passed"] else "BROKEN"
    took = f"on {result['date']}, in {result['seconds']:,} s ({result['machine']})"
    return f"{outcome} with {listed(result['trials'])} {took}"


def promise_page() -> str:
    rows = tomllib.loads((ROOT / "docs" / "promises.toml").read_text())
    stored = json.loads((ROOT / "docs" / "promises.json").read_text())
    results = {result["test"]: result for result in stored}
    tiered: dict[str, list[TieredTest]] = {}
    for test in tiered_tests():
        tiered.setdefault(test.promise, []).append(test)
    if unknown := sorted(tiered.keys() - rows.keys()):
        raise ValueError(f"docs/promises.toml has no {', '.join(unknown)}")
    parts = [INTRO]
    for name, row in rows.items():
        lines = [f"## {name}: {row['promise']}\n"]
        tests = row.get("tests", ())
        for test in tests:
            require_exists(test)
        few = [
            f"{listed(test.few)}{', on a GPU' if test.gpu else ''}: `tests/{test.name}`"
            for test in tiered.get(name, ())
            if test.few
        ]
        if tests:
            few.append(f"{row.get('numbers', 'one case')}: {', '.join(f'`{test}`' for test in tests)}")
        lines += [f"- `make test`: {text}" for text in few]
        for test in tiered.get(name, ()):
            command = "make soak-gpu" if test.gpu else "make soak"
            lines.append(f"- `{command}`: {listed(test.many)}. Last result: {result_line(test, results)}")
        if name not in tiered:
            lines.append("- `make soak`: the tests of `make test` only")
        if "missing" in row:
            lines.append(f"- missing: {row['missing']}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
