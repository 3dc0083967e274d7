"""Overrides of spec values, `--set path=value`. Errors about an overridden value point to the override."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specc.compiler.errors import Mark, quote
from specc.compiler.strict import Path
from specc.compiler.text.source import Source, failure, read_from

FLAG = "--set"


def apply_overrides(source: Source, overrides: Iterable[str]) -> Source:
    """Applies texts `path=value` to a source, in order. Later overrides take precedence.

    A path consists of keys, separated by dots. Items of a list are numbered from 0, as in `model.embed.0.dim=64`. A
    value is YAML. The last key of a path may be new. If this key is `+` or the next number of a list, the value is
    appended to the list. Validation reports unknown keys later.

    Raises:
        SpecError: S014, if an override is malformed or its path does not exist.
    """
    for text in overrides:
        source = _laid(source, text)
    return source


def _laid(source: Source, text: str) -> Source:
    dots, equals, _ = text.partition("=")
    name = f"{FLAG} {dots.strip()}" if equals else FLAG
    if not equals or not dots.strip() or dots != dots.strip():
        raise failure(name, text, "S014", f"{quote(text)} is not an override", f"write {FLAG} path=value")
    over = read_from(text, name, len(dots) + 1)
    path, last = _path(source.data, dots, name, text)
    mark = Mark(1, last + 1)
    over = replace(over, keys={**over.keys, (): mark}, values={(): mark, **over.values})
    return replace(source, data=_with(source.data, path, over.data), overlays=(*source.overlays, (path, over)))


def _path(data: Any, dots: str, name: str, text: str) -> tuple[Path, int]:
    """Splits a dotted path into keys and indices. Also returns the character index of the last part.

    A key of the data may itself contain dots. If several keys match, the longest key is used.
    """
    parts, at, last = dots.split("."), 0, 0
    path: Path = ()
    while parts:
        above, last = quote(dots[: max(0, at - 1)] or "the spec"), at
        step: str | int = parts[0]
        if isinstance(data, tuple) or (data is None and (parts[0].isdecimal() or parts[0] == "+")):
            items = data or ()
            number = str(len(items)) if parts[0] == "+" else parts[0]
            step = int(number) if re.fullmatch("[0-9]{1,9}", number) else len(items) + 1
            if step > len(items):
                message = f"{above} has no item {quote(parts[0])}"
                hint = f"it has {len(items)} items, counted from 0; `+` appends"
                raise failure(name, text, "S014", message, hint, at)
            data = (*items, None)[step]
        elif data is None or isinstance(data, dict):
            known = data or {}
            joins = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
            step = next((key for key in joins if key in known), parts[0])
            data = known.get(step)
        else:
            raise failure(name, text, "S014", f"{above} is {quote(data)} and has no keys", "end the path there", at)
        path = (*path, step)
        taken = step.count(".") + 1 if isinstance(step, str) else 1
        at += len(".".join(parts[:taken])) + 1
        parts = parts[taken:]
    return path, last


def _with(data: Any, path: Path, value: object) -> object:
    if not path:
        return value
    key, *rest = path
    if isinstance(key, int):
        items = (*(data or ()), None)[: max(len(data or ()), key + 1)]
        return tuple(_with(item, tuple(rest), value) if i == key else item for i, item in enumerate(items))
    return {**(data or {}), key: _with((data or {}).get(key), tuple(rest), value)}
