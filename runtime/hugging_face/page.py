"""Formats a spec as readable YAML. Short mappings are on one line, and long mappings on several lines."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 110
BROKEN = ("model", "blocks", "train", "quant")  # mappings that are always on several lines
_PLAIN = re.compile(r"[A-Za-z_0-9(][^,:\[\]{}#\"'&!|>@`]*(?<! )")
_RESERVED = re.compile(r"(?i)true|false|null|yes|no|on|off|~|[-+.0-9_e]+|0x[0-9a-f]+")


def page(data: Mapping[str, Any], comment: str = "") -> str:
    """Returns the text of a spec. Blank lines separate the sections that have several lines.

    Args:
        data: the spec as data.
        comment: the comment above the spec; empty for no comment.
    """
    text = [f"# {line}" for line in comment.splitlines()]
    long = False
    for key, value in data.items():
        lines = list(_entry(key, value, 0))
        if long or len(lines) > 1:
            text.append("")
        text += lines
        long = len(lines) > 1
    return "\n".join(text) + "\n"


def _entry(key: str, value: Any, indent: int) -> Iterator[str]:
    start = f"{' ' * indent}{_scalar(key)}:"
    if isinstance(value, Mapping | list):
        flat = f"{start} {_flow(value)}"
        if len(flat) <= WIDTH and key not in BROKEN and not _has_lines(value):
            yield flat
            return
        yield start
        if isinstance(value, Mapping):
            for inner, item in value.items():
                yield from _entry(inner, item, indent + 2)
        else:
            for item in value:
                yield from _item(item, indent + 2)
        return
    yield f"{start} {_scalar(value)}"


def _has_lines(value: Any) -> bool:
    mappings = [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    return len(mappings) > 1 or any("where" in item for item in mappings)


def _item(value: Any, indent: int) -> Iterator[str]:
    start = f"{' ' * indent}- "
    flat = start + _flow(value)
    listed = isinstance(value, Mapping) and len(value) == 1 and isinstance(next(iter(value.values())), list)
    if not isinstance(value, Mapping) or (len(flat) <= WIDTH and not listed and "where" not in value):
        yield flat
        return
    lines = [line for key, inner in value.items() for line in _entry(key, inner, indent + 2)]
    yield start + lines[0][indent + 2 :]
    yield from lines[1:]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(_flow, value)) + "]" if isinstance(value, list | tuple) else _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return str(value)
    plain = _PLAIN.fullmatch(value) and not _RESERVED.fullmatch(value)
    return value if plain else json.dumps(value, ensure_ascii=True)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    text = repr(value)
    if "e" not in text:
        return text
    digits, _, power = text.partition("e")
    if -8 < int(power) < 0:
        return f"{value:.{len(digits.replace('.', '').replace('-', '')) - 1 - int(power)}f}"
    return f"{digits if '.' in digits else f'{digits}.0'}e{power}"
