"""Cases of bad specs: a change to a valid base spec, and the exact message that it gives.

A family is a Markdown file of tests/errors. A case is a heading `## name` and two fenced blocks: the change, and the
message. The change is a diff against decoder.yaml, or against the base that the fence names (`diff pairs.yaml`).
Lines that begin with a space or `-` stand once in the base, one after the other; `@@` separates places. A block of
YAML instead of a diff is a whole spec; a block of sh is commands that run beside the bases, the last of which fails. A
third block, `sh good`, has commands without the error. Cases of commands.md are named after their code.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "errors"
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.md")))
BASES = tuple(sorted(path.name for path in FOLDER.glob("*.yaml")))
CASE = re.compile(
    r"^## (\S+)\n+```(diff|yaml|sh)(?: (\S+))?\n(.*?)^```\n+```text\n(.*?)^```\n(?:```sh good\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Case:
    """One bad spec. `file` is the name that the message gives it."""

    family: str
    name: str
    file: str
    text: str
    language: str
    change: str
    message: str
    good: str = ""

    def shows(self, code: str) -> bool:
        """Whether the case is one of a code."""
        return self.name == code or f" {code} " in self.message


@cache
def base_text(name: str) -> str:
    return (FOLDER / name).read_text()


def patched(base: str, change: str) -> str:
    """Apply a diff without line numbers to a text.

    Raises:
        ValueError: Lines of the diff do not stand exactly once in the text.
    """
    text = "\n" + base
    for part in re.split(r"^@@\n", change, flags=re.MULTILINE):
        lines = part.splitlines()
        before = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        after = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        if before == "\n" or text.count(before) != 1:
            raise ValueError(f"these lines do not stand exactly once in the base spec:{before}")
        text = text.replace(before, after)
    return text[1:]


def cases_of(family: str) -> list[Case]:
    """The cases of one file, in its order."""
    text = (FOLDER / f"{family}.md").read_text()
    cases = []
    for name, language, base, change, message, good in CASE.findall(text):
        file = base or ("decoder.yaml" if language == "diff" else "spec.yaml")
        spec = patched(base_text(file), change) if language == "diff" else change
        cases.append(Case(family, name, file, spec, language, change, message, good))
    if len(cases) != len(re.findall(r"^## ", text, re.MULTILINE)):
        raise ValueError(f"{family}.md: a case is a heading, a block of diff or yaml, and a block of text")
    return cases


def write_message(case: Case, message: str) -> None:
    """Replace the message of a case in its file."""
    path = FOLDER / f"{case.family}.md"
    text = path.read_text()
    match = next(match for match in CASE.finditer(text) if match[1] == case.name)
    path.write_text(text[: match.start(5)] + message + text[match.end(5) :])
