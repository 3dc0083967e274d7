"""The text of a resolved spec. The text states every value that applies, and the origin of the value."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Path
from specc.compiler.text.source import Source

# Texts that YAML reads as strings without quotes.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./*()+ -]*(?<! )")
_WORDS = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
_TAGS = ("kind", "scheme")  # keys that come first
_COLUMN = 48  # the column at which comments begin, if the line is short enough


def resolved_text(spec: Spec, source: Source, overrides: Iterable[str] = ()) -> str:
    """Returns a spec as YAML that states every value. A comment states the origin of each value.

    The origin is the file and the line, the override, or `default`. A value that is not set and has no default is
    omitted. The text is itself a spec, with the same canonical form as `spec`.

    Args:
        spec: The checked spec of the source.
        source: The text of the spec and its overrides.
        overrides: The overrides, which the first line states.
    """
    data = spec.model_dump(mode="json", by_alias=True)
    sets = "".join(f" --set {json.dumps(text)}" for text in overrides)
    lines = (f"{line:<{_COLUMN}}  # {origin}" if origin else line for line, origin in _mapping(data, source, (), 0))
    return "\n".join((f"# {source.file}{sets}, with every value that applies", *lines)) + "\n"


Line = tuple[str, str]  # a line of YAML, and the origin of its value


def _mapping(data: Mapping[str, Any], source: Source, path: Path, depth: int) -> Iterator[Line]:
    for key in sorted(data, key=lambda key: key not in _TAGS):
        value = data[key]
        if value is not None or _is_stated(source, (*path, key)):
            yield from _entry(f"{'  ' * depth}{_scalar(key)}:", value, source, (*path, key), depth)


def _entry(head: str, value: Any, source: Source, path: Path, depth: int) -> Iterator[Line]:
    inner = list(_mapping(value, source, path, depth + 1)) if isinstance(value, dict) else []
    if inner:
        yield head, ""
        yield from inner
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        yield head, ""
        for i, item in enumerate(value):
            yield from _item(item, source, (*path, i), depth + 1)
    else:
        yield f"{head} {_flow(value)}", _origin(source, path)


def _item(value: Any, source: Source, path: Path, depth: int) -> Iterator[Line]:
    lines = list(_mapping(value, source, path, depth + 1)) if isinstance(value, dict) else []
    if not lines:
        yield f"{'  ' * depth}- {_flow(value)}", _origin(source, path)
        return
    first, origin = lines[0]
    yield f"{'  ' * depth}- {first.lstrip()}", origin
    yield from lines[1:]


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        parts = (f"{_scalar(key)}: {_flow(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(parts) + "}"
    return "[" + ", ".join(map(_flow, value)) + "]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_stated(source: Source, path: Path) -> bool:
    return source.known(path)[0] == path


def _origin(source: Source, path: Path) -> str:
    nearest, value = source.known(path)
    if nearest != path and isinstance(value, dict | tuple):
        return "default"
    place = source.value(nearest)
    return place.file if place.file.startswith("--set") else f"{place.file}:{place.mark.line}"
