"""Bad specs and their exact messages: every case of the families of this folder is refused with its text.

`SPECC_GOLDEN=1 pytest tests/errors` (or `make golden`) writes the messages anew; read the diff.
"""

import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copy, copytree
from subprocess import CompletedProcess, run

import pytest
from command_server import shell_environment
from error_cases import BASES, FAMILIES, FOLDER, Case, cases_of, write_message
from tiers import Trials, tiers

from specc.compiler.build import plan_spec
from specc.compiler.errors import SpecError, render
from specc.compiler.errors.codes import CODES, exit_code_of
from specc.compiler.errors.formats import FORMATS

SPECS = sorted((FOLDER.parents[1] / "specs").glob("*.yaml"))
CASES = [case for family in FAMILIES for case in cases_of(family)]
GOLDEN = os.environ.get("SPECC_GOLDEN") == "1"


def message_of_spec(case: Case) -> str:
    Path(case.file).write_text(case.text)
    with pytest.raises(SpecError) as caught:
        plan_spec(Path(case.file))
    return render(caught.value) + "\n"


@pytest.fixture(scope="session")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quantized run of decoder.yaml."""
    folder = tmp_path_factory.mktemp("run")
    copy(FOLDER / "decoder.yaml", folder)
    small = "--set train.steps=2 --set train.validate_tokens=512"
    for command in (f"train decoder.yaml --data stdlib --run first {small}", "quantize first --max-tokens 512"):
        end = shell(f"specc {command}", folder)
        assert end.returncode == 0, end.stderr
    return folder


def shell(commands: str, folder: Path) -> CompletedProcess[str]:
    environment = shell_environment(forked="--signal" not in commands)
    return run(["sh", "-ec", commands], env=environment, capture_output=True, text=True, cwd=folder)


def beside_the_bases(commands: str, request: pytest.FixtureRequest) -> CompletedProcess[str]:
    """Runs commands in this folder, with the base specs and, if they name it, a run."""
    for base in BASES:
        copy(FOLDER / base, base)
    if "runs/first" in commands:
        copytree(request.getfixturevalue("a_run") / "first", "runs/first")
    return shell(commands, Path())


def message_of_commands(case: Case, request: pytest.FixtureRequest) -> str:
    end = beside_the_bases(case.text, request)
    code = case.name if case.name in CODES else "S001"
    assert end.returncode == exit_code_of(code), end.stdout + end.stderr
    return end.stdout + end.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.name}")
def test_a_bad_spec_has_its_message(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    message = message_of_commands(case, request) if case.language == "sh" else message_of_spec(case)
    if GOLDEN:
        write_message(case, message)
    else:
        assert message == case.message


def with_torch(case: Case) -> bool:
    """Whether the good commands of a case import torch, which takes seconds for each."""
    return re.search(r"specc (?!validate|build|plan|schema|migrate|diff|init|breaking)", case.good) is not None


def on_gpu(case: Case) -> bool:
    """Whether the good commands of a case need a GPU."""
    return "specc tune" in case.good


GOOD = [
    pytest.param(
        case,
        marks=[*[pytest.mark.soak] * with_torch(case), *[pytest.mark.gpu] * on_gpu(case)],
        id=f"{case.family}-{case.name}",
    )
    for case in CASES
    if case.good
]


@pytest.mark.parametrize("case", GOOD)
def test_the_good_example_of_a_code_is_good(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    end = beside_the_bases(case.good, request)
    assert end.returncode == 0, end.stderr


def test_every_code_has_a_bad_and_a_good_case() -> None:
    """The good case of a diff is its base spec."""
    bad = {code for code in CODES if any(case.shows(code) for case in CASES)}
    good = {code for code in bad if any(case.good or case.language == "diff" for case in CASES if case.shows(code))}
    assert (CODES.keys() - bad, CODES.keys() - good) == (set(), set())


def test_names_of_cases_are_unique() -> None:
    names = [(case.family, case.name) for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("base", BASES)
def test_the_base_specs_are_valid(base: str) -> None:
    plan_spec(FOLDER / base)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_committed_specs_are_valid(path: Path) -> None:
    plan_spec(path)


def mutants(text: str, others: list[str], rng: random.Random) -> Iterator[bytes]:
    """Endless damage of the kinds that editors, merges and tired people do."""
    while True:
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        kind = rng.randrange(10)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 3:
            words = ("0", "-1", "1e30", "3.5", "null", "yes", "''", "[]", "{}", "x", "7", "9" * 30, "2147483647", "all")
            key, colon, _ = lines[at].partition(":")
            lines[at] = f"{key}{colon} {rng.choice(words)}"
        elif kind == 4:
            digits = [i for i, char in enumerate(lines[at]) if char.isdigit()]
            if digits:
                i = rng.choice(digits)
                lines[at] = lines[at][:i] + rng.choice("0123456789") + lines[at][i + 1 :]
        elif kind == 5:
            lines[at] = " " * rng.randrange(6) + lines[at].lstrip() if rng.random() < 0.5 else " " + lines[at]
        elif kind == 6:
            cut = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:cut] + rng.choice("[]{},:#&*!|>'\"%@`-?\t\\ é") + lines[at][cut:]
        elif kind == 7:
            source = rng.choice(others).split("\n")
            start = rng.randrange(len(source))
            lines[at:at] = source[start : start + rng.randrange(1, 6)]
        elif kind == 8:
            del lines[at : at + rng.randrange(1, 12)]
        raw = "\n".join(lines).encode()
        if kind == 9:
            cut = rng.randrange(len(raw))
            raw = raw[:cut] + rng.randbytes(rng.randrange(1, 4)) + raw[cut + rng.randrange(4) :]
        yield raw


@tiers("C1", damaged_specs=(240, 50_000))
def test_damage_to_a_spec_is_an_error_with_a_place(trials: Trials, tmp_path: Path) -> None:
    """None of them takes five seconds to refuse."""
    count = trials["damaged_specs"]
    rng = random.Random(1105 + count)
    texts = [path.read_text() for path in SPECS]
    streams = [mutants(text, texts, rng) for text in texts]
    path = tmp_path / "mutant.yaml"
    refused = 0
    for i in range(count):
        raw = next(streams[i % len(streams)])
        path.write_bytes(raw)
        began = time.process_time()
        try:
            plan_spec(path)
        except SpecError as error:
            refused += 1
            assert time.process_time() - began < 5, raw
            lines = raw.decode("utf-8", "replace").split("\n")
            assert error.exit_code == 2 and error.diagnostics
            for diagnostic in error.diagnostics:
                assert diagnostic.file == str(path) and diagnostic.code in CODES
                assert diagnostic.message and diagnostic.hint
                for mark in (diagnostic.mark, *(mark for _, mark in diagnostic.related)):
                    assert 1 <= mark.line <= len(lines), (raw, diagnostic)
                    assert 1 <= mark.column <= len(lines[mark.line - 1]) + 1, (raw, diagnostic)
            assert render(error) and all(form(error.diagnostics) for form in FORMATS.values())
    assert refused > count / 2
