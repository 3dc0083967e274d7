"""Translates Pydantic's validation errors into diagnostics about the text of a spec.

Pydantic's locations contain the tags of unions, which are not keys of the YAML. Walking the data distinguishes tags
from keys.
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
    """Returns the diagnostics of all errors that Pydantic reported, and the paths of the data that they are about.

    Args:
        error: the errors.
        source: the data and its positions.
        models: the model that is expected at each path.
        root: the model of the whole data.
    """
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
    """Yields the errors without those that follow from others.

    Of a union's members, only the errors of those whose shape matches the data remain.
    """
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
    """Returns the errors grouped by path. Errors about unknown keys are in groups of their own."""
    groups: dict[object, list[Found]] = {}
    for one in found:
        groups.setdefault((one.path, one.kind == "extra_forbidden"), []).append(one)
    return list(groups.values())
