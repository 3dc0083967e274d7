"""The commands and files that a document shows, and how its tests run them.

- A block whose first line is a comment with a path (`# compiler/blocks/shift.py`, or `{# ... #}` in a template) is a
  file of that name.
- A block of `diff` whose first line is `--- ` and a path changes that file: see `error_cases.patched`.
- A block of `sh` holds commands, one per line; a backslash continues one. Two spaces and a comment behind a command
  change its test: `# tested with smaller sizes` adds options that make it quick; with `# needs ...` and `# takes ...`
  it is parsed and not run.
- A block of `console` holds commands behind `$ `, each followed by its output. A line `...` stands for any lines.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\{?# ([\w./]+\.\w+)(?: #\})?\n")


@dataclass(frozen=True)
class ShownFile:
    """A file that a document shows."""

    path: str
    text: str


@dataclass(frozen=True)
class ShownChange:
    """A change to a file that a document shows."""

    path: str
    change: str


@dataclass(frozen=True)
class Command:
    """One command of a document.

    Attributes:
        line: The number of its line in the document, from 1.
        text: The command, without its comment.
        small: Its test adds options that make it quick.
        reason: Why it is not run, such as `needs a GPU`; empty where it is.
        output: What it prints; None where the document does not show it.
    """

    line: int
    text: str
    small: bool = False
    reason: str = ""
    output: str | None = None


def steps_of(path: Path) -> Iterator[ShownFile | ShownChange | Command]:
    """The files, changes and commands of a document, in order."""
    text = path.read_text()
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        line = text.count("\n", 0, block.start(2)) + 1
        if file := FILE.match(body):
            yield ShownFile(file[1], body)
        elif language == "diff" and body.startswith("--- "):
            header, _, change = body.partition("\n")
            yield ShownChange(header.removeprefix("--- "), change)
        elif language == "sh":
            yield from shell_commands(body, line)
        elif language == "console":
            for entry in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
                yield Command(line + body.count("\n", 0, entry.start()), entry[1], output=entry[2])


def shell_commands(body: str, first: int) -> Iterator[Command]:
    for entry in re.finditer(r"^(?!#|$)((?:.*\\\n)*.*)$", body, re.MULTILINE):
        command, _, comment = entry[1].replace("\\\n", " ").partition("  #")
        comment = comment.strip()
        reason = comment if comment.startswith(("needs ", "takes ")) else ""
        yield Command(
            first + body.count("\n", 0, entry.start()), command.strip(), comment == "tested with smaller sizes", reason
        )


def arguments_of(command: str) -> list[str] | None:
    """The arguments of specc in a command, also behind torchrun; None for a command of another program."""
    words = shlex.split(command.replace('"$(which specc)"', "specc"))
    return words[words.index("specc") + 1 :] if "specc" in words else None


def matches(output: str, shown: str) -> bool:
    """Whether an output is the one that a document shows."""
    pattern = "".join(".*" if line == "...\n" else re.escape(line) for line in shown.splitlines(keepends=True))
    return re.fullmatch(pattern, output, re.DOTALL) is not None


def rewritten(output: str, shown: str) -> str:
    """An output with as many lines left out, and as many kept before and behind, as in what a document shows."""
    lines, old = output.splitlines(keepends=True), shown.splitlines(keepends=True)
    if "...\n" not in old:
        return output
    head, tail = old.index("...\n"), len(old) - old.index("...\n") - 1
    return "".join([*lines[:head], "...\n", *lines[len(lines) - tail :]])
