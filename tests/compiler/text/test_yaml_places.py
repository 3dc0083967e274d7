"""Errors of damaged YAML stand at the damage: the committed specs with one random slip each."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers import Trials, tiers

from specc.compiler.errors import SpecError
from specc.compiler.text.source import read

SPECS = [path.read_text() for path in sorted((Path(__file__).parents[3] / "specs").glob("*.yaml"))]
NEAR = 2  # lines
SHARE = 0.01  # of the errors may stand further off; 0.05 before quotes and blocks were looked for

Slip = Callable[[random.Random, str], tuple[str, int]]  # the damaged text, and the line of the damage


def at_character(change: Callable[[random.Random, str], str], where: str = "") -> Slip:
    """A slip that replaces one character by `change` of it, any or one of `where`."""

    def slip(rng: random.Random, text: str) -> tuple[str, int]:
        at = rng.choice([i for i, character in enumerate(text) if not where or character in where])
        return text[:at] + change(rng, text[at]) + text[at + 1 :], text.count("\n", 0, at) + 1

    return slip


def at_line(change: Callable[[random.Random, str], str]) -> Slip:
    """A slip that replaces one line by `change` of it, line end included."""

    def slip(rng: random.Random, text: str) -> tuple[str, int]:
        lines = text.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        lines[at] = change(rng, lines[at])
        return "".join(lines), at + 1

    return slip


SLIPS: dict[str, Slip] = {
    "delete a character": at_character(lambda rng, c: ""),
    "insert a character": at_character(lambda rng, c: rng.choice(":,[]{}'\"#-&*!|>%@` \t\n") + c),
    "delete a bracket": at_character(lambda rng, c: "", "[]{}"),
    "insert a bracket": at_character(lambda rng, c: c + rng.choice("[]{}"), " "),
    "insert a quote": at_character(lambda rng, c: c + rng.choice("'\""), " \n"),
    "delete a colon": at_character(lambda rng, c: "", ":"),
    "insert a dash": at_character(lambda rng, c: " - ", " "),
    "insert a comma": at_character(lambda rng, c: ", ", " "),
    "indent more": at_line(lambda rng, line: " " * rng.choice((1, 2, 3)) + line),
    "indent less": at_line(lambda rng, line: line.removeprefix(" ")),
    "indent by a tab": at_line(lambda rng, line: "\t" + line.lstrip(" ")),
    "join two lines": at_line(lambda rng, line: line.rstrip("\n") + " "),
    "repeat a line": at_line(lambda rng, line: 2 * line),
}


def lines_of(error: SpecError) -> list[int]:
    """The lines that the message shows."""
    return [mark.line for d in error.diagnostics for mark in (d.mark, *(mark for _, mark in d.related))]


@tiers("C1", slips_of_each_kind=(60, 1_000))
def test_errors_stand_near_the_damage(trials: Trials) -> None:
    rng = random.Random(16)
    distances = []
    for _ in range(trials["slips_of_each_kind"]):
        for slip in SLIPS.values():
            text, line = slip(rng, rng.choice(SPECS))
            try:
                read(text)
            except SpecError as error:
                distances.append(min(abs(shown - line) for shown in lines_of(error)))
    assert len(distances) > 400
    share = sum(distance > NEAR for distance in distances) / len(distances)
    assert share <= SHARE, f"{share:.1%} of {len(distances)} errors stand more than {NEAR} lines off"


@pytest.mark.parametrize(
    ("text", "message", "lines"),
    [
        ('a: 1\nb: "2\nc: 3\nd: 4\ne: "x"\n', "a quoted text is not closed", [2, 5]),
        ("a:\n  b: 'x\n  c: 1\n  d: it's\n", "a quoted text is not closed", [2, 4]),
        ('a: "x\n', "a quoted text is not closed", [1]),
        ("a:\n  b:\n    c: 1\n    d: 2\n   e: 3\n", "the indentation does not match the lines above", [5, 2]),
        ("a: [1, 2\nb: 3\nc: 4\nd: 5\n", "a list `[...]` is not closed", [1, 2]),
    ],
)
def test_what_was_left_open_is_shown_where_it_opens(text: str, message: str, lines: list[int]) -> None:
    with pytest.raises(SpecError) as caught:
        read(text)
    assert caught.value.diagnostics[0].message == message
    assert lines_of(caught.value) == lines
