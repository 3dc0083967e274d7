"""Bad specs and their exact messages: every case of the families of this folder is refused with its text.

`SPECC_GOLDEN=1 pytest tests/errors` (or `make golden`) writes the messages anew; read the diff.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from subprocess import run

import pytest
from error_cases import BASES, FAMILIES, FOLDER, Case, cases_of, write_message

from specc.compiler.build import plan_spec
from specc.compiler.errors import SpecError, render
from specc.compiler.spec.check import CODES

SPECS = sorted((FOLDER.parents[1] / "specs").glob("*.yaml"))
CASES = [case for family in FAMILIES for case in cases_of(family)]
GOLDEN = os.environ.get("SPECC_GOLDEN") == "1"


def message_of_spec(case: Case) -> str:
    Path(case.file).write_text(case.text)
    with pytest.raises(SpecError) as caught:
        plan_spec(Path(case.file))
    return render(caught.value) + "\n"


def message_of_commands(case: Case) -> str:
    for base in BASES:
        copy(FOLDER / base, base)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    end = run(["sh", "-ec", case.text], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert end.returncode == 2
    return end.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.name}")
def test_a_bad_spec_has_its_message(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = message_of_commands(case) if case.language == "sh" else message_of_spec(case)
    if GOLDEN:
        write_message(case, message)
    else:
        assert message == case.message


def test_every_code_has_a_case() -> None:
    messages = "".join(case.message for case in CASES)
    assert [code for code in CODES if f" {code} " not in messages] == []


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


def test_damage_to_a_spec_is_an_error_with_a_place(tmp_path: Path) -> None:
    rng = random.Random(1105)
    texts = [path.read_text() for path in SPECS]
    streams = [mutants(text, texts, rng) for text in texts]
    path = tmp_path / "mutant.yaml"
    refused = 0
    for i in range(240):
        raw = next(streams[i % len(streams)])
        path.write_bytes(raw)
        try:
            plan_spec(path)
        except SpecError as error:
            refused += 1
            lines = raw.decode("utf-8", "replace").split("\n")
            assert error.exit_code == 2 and error.diagnostics
            for diagnostic in error.diagnostics:
                assert diagnostic.file == str(path) and diagnostic.code in CODES
                assert diagnostic.message and diagnostic.hint
                for mark in (diagnostic.mark, *(mark for _, mark in diagnostic.related)):
                    assert 1 <= mark.line <= len(lines), (raw, diagnostic)
                    assert 1 <= mark.column <= len(lines[mark.line - 1]) + 1, (raw, diagnostic)
            assert render(error) and render(error, "json") and render(error, "github")
    assert refused > 120
