"""Parses YAML text into plain data with the position of each part, in one pass over the events of ruamel.yaml.

The language is a subset of YAML 1.2 with its core schema (`no` is a string, `1e-3` a number). A text has one document.
These are errors: anchors, aliases, merge keys, tags, directives, duplicate keys and keys that are not strings.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)
from ruamel.yaml.tokens import ScalarToken

from specc.compiler.errors import Diagnostic, Mark, SpecError, quote
from specc.compiler.strict import Path

MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_DIGITS = 40
MAX_FINDINGS = 20

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_PATTERN = re.compile(r"(?:\{[^}]*\}|[^\s,\]}])+")  # a pattern such as *.{q,k}, which YAML reads as an alias
_BEYOND = re.compile(r"\\U(?!000|0010)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = ("unknown escape sequence", "use 'single quotes' around text with backslashes")
_UNCLOSED = ("a quoted text is not closed", "add the closing quote")
# Each entry has four values: a part of the parser's message, the message of the diagnostic, the hint of the diagnostic,
# and whether the construct at fault is unclosed.
_SYNTAX = (
    ("mapping values are not allowed", "unexpected `:`", "quote the text, or check the indentation", False),
    ("could not find expected ':'", "a key has no `:`", "write `key: value`, with a space after the colon", True),
    (
        "expected <block end>",
        "the indentation does not match the lines above",
        "align it with the items or keys of its block",
        False,
    ),
    ("'\\t' that cannot start any token", "a tab stands where YAML needs spaces", "replace the tab by spaces", False),
    ("cannot start any token", "a value cannot begin with this character", 'quote the value: "..."', False),
    ("expected ',' or ']'", "a list `[...]` is not closed", "add a `,` between its items, or the `]`", True),
    ("expected ',' or '}'", "a mapping `{...}` is not closed", "add a `,` between its keys, or the `}`", True),
    ("unexpected end of stream", *_UNCLOSED, True),
    ("unknown escape character", *_ESCAPE, False),
    (
        "expected '<document start>'",
        "unexpected text after the end of the value",
        "check the indentation and the quotes",
        False,
    ),
    ("expected alphabetic or numeric", "a value cannot begin with `%`, `&` or `*`", 'quote the value: "..."', False),
    (
        "expected the node content",
        "a value is missing here",
        "write the value, or remove the punctuation around it",
        False,
    ),
)


# The data of a text as dicts, tuples and scalars, then the positions of keys, of values and of text, as in `Source`.
Parsed = tuple[object, Mapping[Path, Mark], Mapping[Path, Mark], Mapping[Path, tuple[int, int]]]


@lru_cache(maxsize=128)  # a sweep reads one spec, with some overrides, for each run
def parse(text: str, name: str, column: int = 0) -> Parsed:
    """Parses a text. Characters before the index `column` are skipped, but positions count from the beginning of
    `text`. `name` is the name of the text in messages. Calls with equal arguments return the same object, so callers
    must not change this object.

    Raises SpecError if the text is not valid YAML or uses a feature that specs do not allow.
    """
    return _Reading(name, text, column).parsed()


def mark_of(text: str, index: int) -> Mark:
    return Mark(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end the parser has not reached. `names` maps each key of a mapping to the position of the
    key."""

    path: Path
    items: list[object] = field(default_factory=list)
    names: dict[str, Mark] | None = None
    key: str | None = None

    def built(self) -> object:
        return tuple(self.items) if self.names is None else dict(zip(self.names, self.items, strict=True))


class _Reading:
    """One pass over the parser's events. Builds the data without recursion and records the position of every part."""

    def __init__(self, name: str, text: str, column: int) -> None:
        self.name, self.text = name, text
        self.body = " " * column + text[column:]
        self.stack: list[_Open] = []
        self.root: object = None
        self.documents = self.nodes = 0
        self.keys: dict[Path, Mark] = {}
        self.values: dict[Path, Mark] = {}
        self.spans: dict[Path, tuple[int, int]] = {}
        self.problems: list[Diagnostic] = []

    def parsed(self) -> Parsed:
        for event in self._events():
            if isinstance(event, DocumentStartEvent):
                self._document(event)
            elif isinstance(event, NodeEvent):
                self._node(event)
            elif isinstance(event, CollectionEndEvent):
                self._add(self.stack.pop().built())
        if self.problems:
            raise SpecError(self.problems, {self.name: self.text})
        return self.root, self.keys, self.values, self.spans

    def _events(self) -> Iterator[Event]:
        try:
            yield from YAML(typ="safe", pure=True).parse(self.body)
        except MarkedYAMLError as error:
            raise self._syntax(str(error.problem or error.context), error.problem_mark, error.context_mark) from None
        except (YAMLError, ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
            # The parser raises Python errors for some inputs, for example for an escape beyond Unicode.
            escape = _BEYOND.search(self.text)
            if escape:
                self._say("S007", *_ESCAPE, mark_of(self.text, escape.start()))
                raise SpecError(self.problems, {self.name: self.text}) from None
            last = max(self.values.values(), default=Mark(1, 1))
            self._say("S007", f"this is not YAML: {error}", "look at the lines that follow", last)
            raise SpecError(self.problems, {self.name: self.text}) from None

    def _syntax(self, problem: str, stopped: Any, began: Any) -> SpecError:
        """Converts an error of the YAML parser to a SpecError. `problem` is the parser's message, and `stopped` is the
        position of the error. `began` is the start of the construct that the parser was reading."""
        end = len(self.text.rstrip())
        stop_index, start_index = (min(mark.index, end) if mark else 0 for mark in (stopped or began, began))
        stop, start = mark_of(self.text, stop_index), mark_of(self.text, start_index)
        quoted = self._long_quote(stop_index)
        row = next((row for row in _SYNTAX if row[0] in problem), None)
        _, message, hint, left_open = row or ("", f"this is not YAML: {problem}", "check the line above", False)
        if quoted is not None:
            first, last = quoted
            self._say("S007", *_UNCLOSED, first, ("here is the next quote", last))
        elif left_open and self.text[stop_index - 1 : stop_index + 1] in (":[", ":{"):
            colon = mark_of(self.text, stop_index - 1)
            self._say("S007", "a space is missing after a `:`", "write `key: value`, with a space", colon)
        elif left_open and began is not None:
            related = [("unexpected here", stop)] if stop.line != start.line else []
            self._say("S007", message, hint, start, *related)
        else:
            related = [("the block begins here", start)] if "<block end>" in problem and stop.line != start.line else []
            self._say("S007", message, hint, stop, *related)
        return SpecError(self.problems, {self.name: self.text})

    def _long_quote(self, stop: int) -> tuple[Mark, Mark] | None:
        """Finds a multi-line quoted text whose last line contains character `stop`, at which the parser failed. The
        closing quote of such a text was probably meant to open another text. Returns the start and end of the quoted
        text, or None if there is no such text."""
        quoted = None
        try:
            for token in YAML(typ="safe", pure=True).scan(self.body):
                if isinstance(token, ScalarToken) and token.style in ("'", '"') and token.end_mark.index <= stop:
                    quoted = token
        except YAMLError:
            pass
        if quoted is None:
            return None
        first, last = (mark_of(self.text, index) for index in (quoted.start_mark.index, quoted.end_mark.index - 1))
        return (first, last) if first.line < last.line == mark_of(self.text, stop).line else None

    def _say(self, code: str, message: str, hint: str, mark: Mark, *related: tuple[str, Mark]) -> None:
        self.problems.append(Diagnostic(code, message, hint, self.name, mark, related))
        if len(self.problems) >= MAX_FINDINGS:
            raise SpecError(self.problems, {self.name: self.text})

    def _stop(self, code: str, message: str, hint: str, mark: Mark) -> NoReturn:
        self._say(code, message, hint, mark)
        raise SpecError(self.problems, {self.name: self.text})

    def _document(self, event: DocumentStartEvent) -> None:
        mark = Mark(event.start_mark.line + 1, event.start_mark.column + 1)
        self.documents += 1
        if self.documents > 1:
            self._stop("S011", "a second document begins here", "remove the `---`; a file has one spec", mark)
        if event.version or event.tags:
            self._stop("S010", "directives (`%...`) are not allowed", "remove the directive", mark)

    def _node(self, event: NodeEvent) -> None:
        mark = Mark(event.start_mark.line + 1, event.start_mark.column + 1)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._stop("S003", f"the text has more than {MAX_NODES} values", "check that the file is a spec", mark)
        if isinstance(event, AliasEvent):
            message = f"aliases such as {quote(f'*{event.anchor}')} are not allowed"
            meant = None if f"&{event.anchor}" in self.text else _PATTERN.match(self.text, event.start_mark.index)
            hint = f'quote the text: "{meant[0]}"' if meant else "write the value here"
            self._stop("S009", message, hint, mark)
        if event.anchor is not None:
            self._say("S009", f"anchors such as {quote(f'&{event.anchor}')} are not allowed", "remove the anchor", mark)
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag is not None:
            self._say("S010", f"tags such as {quote(event.tag)} are not allowed", "remove the tag", mark)
        top = self.stack[-1] if self.stack else None
        if top is not None and top.names is not None and top.key is None:
            self._key(top, top.names, event, mark)
            return
        path = self._path()
        if isinstance(event, CollectionStartEvent):
            self.values[path] = mark
            if len(self.stack) >= MAX_DEPTH:
                message = f"values are nested more than {MAX_DEPTH} levels deep"
                self._stop("S003", message, "remove brackets; a spec has about six levels", mark)
            self.stack.append(_Open(path, names={} if isinstance(event, MappingStartEvent) else None))
        elif isinstance(event, ScalarEvent):
            # An omitted value has the position of its key.
            empty = event.start_mark.index == event.end_mark.index
            self.values[path] = self.keys.get(path, mark) if empty else mark
            value = self._scalar(event, mark)
            if isinstance(value, str):
                self.spans[path] = (event.start_mark.index, event.end_mark.index)
            self._add(value)

    def _path(self) -> Path:
        if not self.stack:
            return ()
        top = self.stack[-1]
        return (*top.path, len(top.items) if top.key is None else top.key)

    def _add(self, value: object) -> None:
        if not self.stack:
            self.root = value
            return
        self.stack[-1].items.append(value)
        self.stack[-1].key = None

    def _key(self, top: _Open, names: dict[str, Mark], event: NodeEvent, mark: Mark) -> None:
        if not isinstance(event, ScalarEvent):
            self._stop("S012", "a list or mapping is not a valid key", "write text as the key", mark)
        key = str(event.value)
        if event.style is None and key == "<<":
            self._say("S009", "merge keys (`<<`) are not allowed", "write the keys here", mark)
        elif not isinstance(self._scalar(event, mark), str):
            self._say("S012", f"{quote(key)} is not a valid key", "write text as the key; put a number in quotes", mark)
        if first := names.get(key):
            message = f"key {quote(key)} is used twice"
            self._say("S008", message, "remove one of the two", mark, ("first use", first))
            key = f"{key} (again, {len(names)})"
        names[key] = mark
        top.key = key
        self.keys[(*top.path, key)] = mark

    def _scalar(self, event: ScalarEvent, mark: Mark) -> object:
        text = str(event.value)
        if event.style is not None:
            if _SURROGATE.search(text):
                self._say("S007", "an escape sequence is half of a surrogate pair", "write the character itself", mark)
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            if len(text) > MAX_DIGITS:
                hint = f"use at most {MAX_DIGITS} digits"
                self._say("S013", f"a number has {len(text)} digits", hint, mark)
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        return float(text) if _FLOAT.fullmatch(text) else text
