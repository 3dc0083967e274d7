"""The meaning and examples of each error code, as docs/reference/errors.md of the installation states them."""

import difflib
import importlib.resources
import re

from specc.compiler.errors import UsageProblem, one_of
from specc.compiler.errors.codes import CODES, exit_code_of
from specc.compiler.records import record

CODE = re.compile(r"[A-Za-z]{1,2}\d{1,5}")  # also matches misspelled codes
_SECTION = r"^## {code}: .*?$(.*?)(?=^## |\Z)"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@record
class ErrorPage:
    """The explanation of one code.

    Attributes:
        code: the code.
        meaning: the meaning of the code.
        exit_code: the exit code of a command that ends with this error.
        bad: lines of a spec, or commands, that cause the error. Empty if there is no short example.
        message: the error message for `bad`.
        good: the corrected lines or commands. Empty if there is no short example.
    """

    code: str
    meaning: str
    exit_code: int
    bad: str
    message: str
    good: str

    def text(self) -> str:
        parts = [f"{self.code}: {self.meaning} (exit code {self.exit_code})"]
        parts += [
            f"{title}:\n\n{_indented(example)}"
            for title, example in (("bad", self.bad), ("message", self.message), ("good", self.good))
            if example
        ]
        return "\n\n".join(parts)


def page_of(code: str) -> ErrorPage:
    """Returns the page of a code. Raises UsageProblem if the code does not exist."""
    if code not in CODES:
        near = difflib.get_close_matches(code, CODES, n=3, cutoff=0.6)
        raise UsageProblem(
            f"there is no code {code}", f"did you mean {one_of(near)}?" if near else "`specc explain` lists all codes"
        )
    text = importlib.resources.files("specc.reference").joinpath("errors.md").read_text(encoding="utf-8")
    section = re.search(_SECTION.format(code=code), text, re.MULTILINE | re.DOTALL)
    blocks = _BLOCK.findall(section[1]) if section else []
    bad, message, good = ([body for _, body in blocks] + ["", "", ""])[:3]
    if blocks and blocks[0][0] == "diff":
        bad, good = _side(bad, "+"), _side(bad, "-")
    return ErrorPage(code, CODES[code], exit_code_of(code), bad, message, good)


def _side(change: str, sign: str) -> str:
    lines = [f"  ...{line[2:]}" if line == "@@" else line for line in change.splitlines()]
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", sign))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())
