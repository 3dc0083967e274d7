"""Reads spec text into plain data, with the location of every key and value. Unsafe text is rejected before parsing."""

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path as FilePath
from typing import NamedTuple

from specc.compiler.errors import Diagnostic, Mark, SpecError, quote
from specc.compiler.records import record
from specc.compiler.strict import Path
from specc.compiler.text.yaml import MAX_NODES, mark_of, parse

MAX_BYTES = 1 << 20
MAX_LINE = 10_000
STDIN = FilePath("specs/<stdin>")  # represents standard input; located in specs/ so that the locks there apply
_OWN_PIPES = (FilePath("/dev"), FilePath("/dev/fd"), FilePath("/proc/self/fd"))  # FIFOs in this folder are already open

# Control characters, line separators that editors do not show as lines, and marks that reorder text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
_TAB = re.compile(r"^ *\t", re.MULTILINE)
_SEPARATOR = re.compile(r"[,\[{\n]")
# Patterns of one character of a scalar, as written: without quotes, in single quotes, and in double quotes. A line
# break counts as one space.
_BREAK = r"[ \t]*\n\s*|"
_PLAIN = re.compile(_BREAK + ".")
_SINGLE = re.compile(_BREAK + "''|.")
_DOUBLE = re.compile(_BREAK + r"\\x..|\\u.{4}|\\U.{8}|\\.|.")


class Place(NamedTuple):
    """A position in a file or an override. Messages show an override like a file."""

    file: str
    mark: Mark


@record
class Source:
    """The parsed data of a text and the location of each part.

    Attributes:
        file: the name of the file for messages.
        text: the text of the file.
        data: the content, as dicts, tuples and scalars.
        keys: the position of the key at each path in the data.
        values: the position of the value at each path in the data.
        spans: the (start, end) character indices of each string scalar in the text, by path in the data.
        overlays: one pair per override: the path of the replaced value, and the override as a source. The text of an
            override begins with the dotted path.
    """

    file: str
    text: str
    data: object
    keys: Mapping[Path, Mark] = field(default_factory=dict)
    values: Mapping[Path, Mark] = field(default_factory=dict)
    spans: Mapping[Path, tuple[int, int]] = field(default_factory=dict)
    overlays: tuple[tuple[Path, "Source"], ...] = ()

    def place(self, path: Path) -> Place:
        """Returns the position to display for a problem at `path`.

        For a scalar, this is the position of the value. For a list or mapping, it is the position of the key. If
        `path` does not exist, the nearest existing parent is used.
        """
        known, value = self.known(path)
        return self.key(known) if isinstance(value, dict | tuple) else self.value(known)

    def value(self, path: Path) -> Place:
        return self._find(path, lambda source, rest: source.values.get(rest))

    def key(self, path: Path) -> Place:
        """Returns the position of the key at `path`. For a list item, returns the start of the item."""
        return self._find(path, lambda source, rest: source.keys.get(rest, source.values.get(rest)))

    def inside(self, path: Path, offset: int) -> Place:
        """Returns the position of character `offset` of the string at `path`. For block scalars (`|` and `>`), returns
        the start of the string."""
        return self._find(path, lambda source, rest: source._inside(rest, offset))

    @property
    def texts(self) -> dict[str, str]:
        return {self.file: self.text} | {over.file: over.text for _, over in self.overlays}

    def known(self, path: Path) -> tuple[Path, object]:
        """Returns the longest beginning of `path` that exists in the data, and the value there."""
        value = self.data
        for depth, part in enumerate(path):
            inner = step(value, part)
            if inner is None:
                return path[:depth], value
            value = inner[0]
        return path, value

    def _find(self, path: Path, find: "Callable[[Source, Path], Mark | None]") -> Place:
        for prefix, over in reversed(self.overlays):
            if path[: len(prefix)] == prefix:
                return over._find(path[len(prefix) :], find)
            if prefix[: len(path)] == path and path not in self.values:
                return Place(over.file, Mark(1, 1 + len(".".join(str(part) for part in (*path[:-1], "")))))
        while (mark := find(self, path)) is None and path:
            path = path[:-1]
        return Place(self.file, mark or Mark(1, 1))

    def _inside(self, path: Path, offset: int) -> Mark | None:
        start = self.values.get(path)
        if start is None or path not in self.spans:
            return start
        first, end = self.spans[path]
        if self.text[first:end][:1] in ("|", ">"):
            return start
        quoted = self.text[first] in ("'", '"')
        character = {"'": _SINGLE, '"': _DOUBLE}.get(self.text[first], _PLAIN)
        pieces = character.findall(self.text[first + quoted : end - quoted])
        before = self.text[first : first + quoted + sum(map(len, pieces[: min(offset, len(pieces) - 1)]))]
        line, _, last = before.rpartition("\n")
        if not line:
            return Mark(start.line, start.column + len(before))
        return Mark(start.line + before.count("\n"), len(last) + 1)


def step(value: object, part: str | int) -> tuple[object] | None:
    if isinstance(value, dict) and isinstance(part, str) and part in value:
        return (value[part],)
    if isinstance(value, tuple) and isinstance(part, int) and 0 <= part < len(value):
        return (value[part],)
    return None


def read(origin: FilePath | str, name: str = "<text>") -> Source:
    """Reads a spec from a file (a Path) or from text (a str, displayed as `name`).

    Raises SpecError (S001-S013) if the file cannot be read, is empty, or is not in the YAML subset of specs.
    """
    if isinstance(origin, FilePath):
        name, text = name_of(origin), read_text(origin)
    else:
        text = origin
    source = read_from(text, name)
    if source.data is None:
        hint = "start from a spec that works: `specc init NAME --from SPEC`"
        raise failure(name, text, "S002", "the file is empty", hint)
    return source


def name_of(path: FilePath) -> str:
    return path.name if path == STDIN else str(path)


def read_from(text: str, name: str, column: int = 0) -> Source:
    """Parses a text without rejecting empty data. Characters before the index `column` are skipped, but positions count
    from the beginning of `text`. `name` is the name of the text in messages."""
    _screen(text, name)
    return Source(name, text, *parse(text, name, column))


def failure(name: str, text: str, code: str, message: str, hint: str, at: int = 0) -> SpecError:
    """Creates a SpecError with one diagnostic.

    Args:
        name: the name of the file for messages.
        text: the text of the file. The diagnostic shows one of its lines.
        code: the code of the error, such as `S001`.
        message: the problem.
        hint: how to fix the problem.
        at: the index of the wrong character in `text`.

    Returns:
        The error.
    """
    return SpecError([Diagnostic(code, message, hint, name, mark_of(text, at))], {name: text})


def read_text(path: FilePath) -> str:
    """Returns the text of a file. Raises SpecError (S001, S003, S004) if the file cannot be read, is too large, or is
    not UTF-8."""
    name = name_of(path)
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            if path.is_fifo() and path.parent not in _OWN_PIPES:  # opening a FIFO could wait for a writer forever
                hint = "give a file, or `-` for standard input"
                raise failure(name, "", "S001", "this is a named pipe", hint)
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        here = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, here, 1, 0.5)
        hint = f"did you mean {quote(str(path.parent / near[0]), 200)}?" if near else "check the path"
        raise failure(name, "", "S001", "the file does not exist", hint) from None
    except IsADirectoryError:
        raise failure(name, "", "S001", "this is a directory", "give a YAML file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "check the path and its permissions"
        raise failure(name, "", "S001", f"the file cannot be read: {reason.lower()}", hint) from None
    if len(raw) > MAX_BYTES:
        raise failure(name, "", "S003", f"the file has more than {MAX_BYTES} bytes", "check that the file is a spec")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        hint = "save the file as UTF-8 without a byte-order mark"
        raise failure(name, "", "S004", "the file starts with a byte-order mark", hint)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        text, at = raw.decode("utf-8", "replace"), len(raw[: error.start].decode("utf-8"))
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise failure(name, text, "S004", message, "save the file as UTF-8", at) from None


def _screen(text: str, name: str) -> None:
    """Raises SpecError for text that cannot be displayed, and for text that the parser would misread or process
    slowly."""
    if len(text) > MAX_BYTES:
        message = f"the text has more than {MAX_BYTES} characters"
        raise failure(name, "", "S003", message, "check that the file is a spec")
    if unseen := _UNSEEN.search(text.replace("\r\n", " \n")):
        message = f"character U+{ord(unseen.group()):04X} is not printable"
        hint = 'delete it, or write it as an escape sequence in a "quoted" value'
        raise failure(name, text, "S005", message, hint, unseen.start())
    longest = max(text.split("\n"), key=len)
    if len(longest) > MAX_LINE:
        message = f"a line has {len(longest)} characters, more than {MAX_LINE}"
        raise failure(name, text, "S003", message, "split it", text.index(longest))
    if tab := _TAB.search(text):
        raise failure(name, text, "S006", "a tab is in the indentation", "indent with spaces", tab.end() - 1)
    if sum(1 for _ in _SEPARATOR.finditer(text)) > MAX_NODES:
        raise failure(name, "", "S003", f"the text has more than {MAX_NODES} values", "check that the file is a spec")
