"""Translates what Pydantic finds wrong with the data of a spec into diagnostics about what is written.

Its locations hold the tags of unions, which are no keys of the YAML; walking the data tells them apart.
"""

from collections.abc import Iterable, Iterator, Mapping

from pydantic_core import ErrorDetails, ValidationError

from specc.compiler.errors import Diagnostic
from specc.compiler.spec.messages.expected import Model
from specc.compiler.spec.messages.keys import Words
from specc.compiler.spec.messages.values import TYPES, Found
from specc.compiler.strict import Path
from specc.compiler.text.source import Source, step


def diagnostics_of(
    error: ValidationError, source: Source, models: Mapping[Path, Model], root: Model
) -> tuple[tuple[Diagnostic, ...], frozenset[Path]]:
    """The diagnostics of everything Pydantic found, and the paths in the data that they are about."""
    found = [_located(details, source.data) for details in error.errors(include_url=False)]
    found = list(_settled(found))
    said = [one for group in _grouped(found) for one in Words(source, models, root).say(group)]
    return tuple(said), frozenset(one.path for one in found)


def _located(details: ErrorDetails, data: object) -> Found:
    path: Path = ()
    value, fork, member, entered = data, None, "", True
    parts = details["loc"]
    missing = parts[-1:] if details["type"] == "missing" else ()
    for part in parts[: len(parts) - len(missing)]:
        inner = step(value, part)
        if inner is not None:
            path, value, entered = (*path, part), inner[0], True
            continue
        tag = entered and isinstance(value, dict) and part in value.values()
        if part != "[key]" and not tag and fork is None:
            fork, member = len(path), str(part)
        entered = False
    return Found(details, path + missing, value, fork, member)


def _settled(found: Iterable[Found]) -> Iterator[Found]:
    """Of a union's members, those whose shape the data has; and nothing that another error made up."""
    kept = list(found)
    for fork in {(one.path[: one.fork]) for one in kept if one.fork is not None}:
        rivals = [one for one in kept if one.fork == len(fork) and one.path[: len(fork)] == fork]
        fitting = {one.member for one in rivals} - {
            one.member for one in rivals if one.path == fork and one.kind in TYPES
        }
        if fitting:
            kept = [one for one in kept if one not in rivals or one.member in fitting]
    for one in kept:
        short = one.kind == "too_short" and isinstance(one.value, tuple)
        if not (short and len(one.value) >= one.context["min_length"]):  # type: ignore[arg-type]
            yield one


def _grouped(found: Iterable[Found]) -> list[list[Found]]:
    """The errors by path, those about unknown keys each alone."""
    groups: dict[object, list[Found]] = {}
    for one in found:
        groups.setdefault((one.path, one.kind == "extra_forbidden"), []).append(one)
    return list(groups.values())
