"""Bad specs and their exact messages: every NAME.yaml here must be refused with the text of NAME.txt.

`SPECC_GOLDEN=1 pytest tests/errors` (or `make golden`) writes the texts anew; read the diff.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from specc.compiler.build import validate
from specc.compiler.errors import SpecError, render
from specc.compiler.spec.check import CODES

HERE = Path(__file__).parent
SPECS = sorted((HERE.parents[1] / "specs").glob("*.yaml"))
CASES = sorted(path.stem for path in HERE.glob("*.yaml"))
GOLDEN = os.environ.get("SPECC_GOLDEN") == "1"


def error_of(path: Path) -> SpecError:
    with pytest.raises(SpecError) as caught:
        validate(path)
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_a_bad_spec_says_exactly_this(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    text = render(error_of(Path(f"{name}.yaml"))) + "\n"
    if GOLDEN:
        Path(f"{name}.txt").write_text(text)
    assert text == Path(f"{name}.txt").read_text()


def test_the_gallery_is_whole() -> None:
    assert len(CASES) >= 60
    assert sorted(path.stem for path in HERE.glob("*.txt")) == CASES
    shown = "".join((HERE / f"{name}.txt").read_text() for name in CASES)
    # What cannot be read or stand in a text file is in test_source.py; overrides are in test_overrides.py.
    elsewhere = {"S001", "S004", "S014"}
    assert [code for code in CODES if f" {code} " not in shown and code not in elsewhere] == []


def test_the_valid_base_is_valid(tmp_path: Path) -> None:
    """The cases are this spec with something wrong; it must not be wrong itself."""
    text = (HERE / "type_quoted_number.yaml").read_text()
    path = tmp_path / "base.yaml"
    path.write_text(text.replace("'64'", "64"))
    validate(path)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_committed_specs_are_valid(path: Path) -> None:
    validate(path)


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
            words = (
                "0",
                "-1",
                "1e30",
                "3.5",
                "null",
                "yes",
                "''",
                "[]",
                "{}",
                "x",
                "7",
                "9" * 30,
                "2147483647",
                "all",
            )
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


def test_no_damage_to_a_spec_is_more_than_an_error_with_a_place(tmp_path: Path) -> None:
    rng = random.Random(1105)
    texts = [path.read_text() for path in SPECS]
    streams = [mutants(text, texts, rng) for text in texts]
    path = tmp_path / "mutant.yaml"
    refused = 0
    for i in range(500):
        raw = next(streams[i % len(streams)])
        path.write_bytes(raw)
        try:
            validate(path)
        except SpecError as error:
            refused += 1
            lines = raw.decode("utf-8", "replace").split("\n")
            assert error.exit_code == 2 and error.diagnostics
            for one in error.diagnostics:
                assert one.file == str(path) and one.code in CODES and one.message and one.hint
                for mark in (one.mark, *(mark for _, mark in one.related)):
                    assert 1 <= mark.line <= len(lines), (raw, one)
                    assert 1 <= mark.column <= len(lines[mark.line - 1]) + 1, (raw, one)
            assert render(error) and render(error, "json") and render(error, "github")
    assert refused > 250
