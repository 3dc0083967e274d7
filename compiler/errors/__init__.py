"""Diagnostics: their code, location and hint, their text for a terminal, and the exit codes of the command line."""

import errno
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from specc.compiler.records import record

EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_BUG = 70
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

FULL = (errno.ENOSPC, errno.EDQUOT)  # the values of errno for a full disk and an exhausted quota

SNIPPET_WIDTH = 100
MESSAGE_WIDTH = 600


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A position in a text. `line` and `column` count characters from 1."""

    line: int
    column: int


@record
class Diagnostic:
    """One problem, its location, and a hint that states how to fix the problem.

    Attributes:
        code: the code of the problem, a key of `codes.CODES`.
        message: the problem.
        hint: how to fix the problem. Empty if the fix is obvious.
        file: the file with the problem, or "".
        mark: the position in the file.
        related: (note, position) pairs in the same file.
    """

    code: str
    message: str
    hint: str
    file: str = ""
    mark: Mark = Mark(1, 1)
    related: tuple[tuple[str, Mark], ...] = ()


class Coded(Protocol):
    """An error with a code, a message and a hint: a SpeccError, or an error of the runtime."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def hint(self) -> str: ...


class SpeccError(Exception):
    """The base class of errors that the user can fix. The command shows such an error without a traceback, and exits
    with `exit_code`."""

    exit_code: ClassVar[int] = EXIT_USAGE
    code: ClassVar[str] = "U002"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class EnvironmentProblem(SpeccError):
    """Raised for a problem of the machine: no GPU, no nvcc, a missing package, or a full disk."""

    exit_code = EXIT_ENVIRONMENT
    code = "E001"


class MissingPackage(EnvironmentProblem):
    """Raised if a package is not installed."""

    code = "E002"


class DiskProblem(EnvironmentProblem):
    """Raised if a disk is full, or a file cannot be read or written."""

    code = "E003"


class UsageProblem(SpeccError):
    """Raised if a command line is wrong."""

    code = "U001"


class Ended(Exception):
    """Raised if a signal ended the command. `code` is P001 or P002."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, ""


class Bug(Exception):
    """Raised for a bug in specc."""

    code: ClassVar[str] = "B001"
    MESSAGE: ClassVar[str] = "this is a bug in specc; please report it with the spec and the command"

    def __init__(self, error: Exception) -> None:
        self.message, self.hint = f"{type(error).__name__}: {error}", self.MESSAGE
        super().__init__(self.message)


class SpecError(SpeccError):
    """Raised with all problems of a spec, sorted by location. `texts` maps each file of a diagnostic to the text of the
    file."""

    def __init__(self, diagnostics: Iterable[Diagnostic], texts: Mapping[str, str]) -> None:
        self.diagnostics = tuple(sorted(set(diagnostics), key=lambda d: (d.file, d.mark, d.code, d.message)))
        self.texts = dict(texts)
        first = self.diagnostics[0]
        self.code = first.code  # type: ignore[misc]
        super().__init__(
            f"{first.file}:{first.mark.line}:{first.mark.column}: {first.code} {first.message}", first.hint
        )

    def __str__(self) -> str:
        return render(self)


def quote(value: object, width: int = 60) -> str:
    """Formats a value for a message: in backquotes, on one line, escaped and cut to at most `width` characters."""
    text = safe(value if isinstance(value, str) else _spell(value))
    return f"`{text}`" if len(text) <= width else f"`{text[: width - 3]}...`"


def one_of(words: Iterable[object]) -> str:
    """Joins quoted words as "`a`, `b` or `c`". Returns "nothing" if there are no words."""
    quoted = [quote(word) for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}" if quoted else "nothing"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 warp` or `2 warps`."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def safe(text: str) -> str:
    """Returns `text` with escapes in place of non-printable characters, which could move the cursor or hide other
    text."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def diagnostics_of(error: Coded) -> tuple[Diagnostic, ...]:
    """Returns the diagnostics of an error: all problems of a spec, or the error itself, which has no location."""
    if isinstance(error, SpecError):
        return error.diagnostics
    return (Diagnostic(error.code, error.message, error.hint),)


def render(error: Coded, color: bool = False) -> str:
    """Formats an error as text for a terminal. The result has no final newline."""
    sources = error.texts if isinstance(error, SpecError) else {}
    texts = {file: text.replace("\r\n", "\n").split("\n") for file, text in sources.items()}
    diagnostics = diagnostics_of(error)
    parts = [_as_text(diagnostic, texts.get(diagnostic.file, []), color) for diagnostic in diagnostics]
    if len(parts) > 1:
        parts.append(f"{len(parts)} errors")
    return "\n\n".join(parts)


def _spell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_spell(item)}" for key, item in list(value.items())[:20]) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_spell(item) for item in value[:20]) + "]"
    return str(value)


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code < 0xDD00:  # a byte of a file name that is not text in this locale
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _cut(text: str) -> str:
    text = safe(text)
    return text if len(text) <= MESSAGE_WIDTH else f"{text[: MESSAGE_WIDTH - 3]}..."


def _styled(code: str, on: bool, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if on else text


def _as_text(diagnostic: Diagnostic, lines: list[str], color: bool) -> str:
    bold, red, blue = (partial(_styled, code, color) for code in ("1", "1;31", "1;34"))
    mark = diagnostic.mark
    place = f"{safe(diagnostic.file)}:{mark.line}:{mark.column}: " if diagnostic.file else "error: "
    shown = [bold(place) + f"{red(diagnostic.code)} " + _cut(diagnostic.message)]
    places = [("", mark), *diagnostic.related]
    margin = max(len(str(at.line)) for _, at in places)
    for number, (note, at) in enumerate(places):
        if 1 <= at.line <= len(lines) and lines[at.line - 1].strip():
            text, before, width = _window(lines[at.line - 1], at.column)
            bar, caret = blue("|"), (red if number == 0 else blue)("^" * width)
            shown += [f"{'':{margin}} {bar}", f"{blue(f'{at.line:{margin}}')} {bar} {text}"]
            shown.append(f"{'':{margin}} {bar} {'':{before}}{caret} {_cut(note)}".rstrip())
        elif note:
            shown.append(f"{'':{margin}} {blue('=')} note: {_cut(note)} (line {at.line})")
    if diagnostic.hint:
        shown.append(f"{'':{margin}} {blue('=')} help: {_cut(diagnostic.hint)}")
    return "\n".join(shown)


def _window(line: str, column: int) -> tuple[str, int, int]:
    """Returns the displayable part of a line around a column, and the position and width of the caret under this part.

    Non-printable characters are replaced. Position and width are in terminal cells.
    """
    start = 0 if len(line) <= SNIPPET_WIDTH else max(0, column - 1 - SNIPPET_WIDTH // 2)
    end = min(len(line), start + SNIPPET_WIDTH)
    head, tail = ("..." if start else ""), ("..." if end < len(line) else "")
    word = re.match(r"\"[^\"]*\"|'[^']*'|[-+]?[\w.*]+", line[column - 1 : end])
    until = min(end, column - 1 + (word.end() if word else 1))
    before = len(head) + sum(_width(char) for char in line[start : column - 1])
    caret = max(1, sum(_width(char) for char in line[column - 1 : until]))
    return head + "".join(_visible(char) for char in line[start:end]) + tail, before, caret


def _visible(char: str) -> str:
    if char == "\t":
        return " "
    return char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"


def _width(char: str) -> int:
    if not char.isprintable():
        return 1
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
