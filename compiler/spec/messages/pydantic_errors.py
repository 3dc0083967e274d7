"""Translates Pydantic's validation errors into diagnostics about the text of a spec.

The locations in Pydantic's errors contain the tags of unions, which are not keys of the YAML. This module follows each
location through the data to tell tags from keys.
"""

from collections.abc import Iterable, Iterator, Mapping

from pydantic_core import ErrorDetails, ValidationError

from specc.compiler.errors import Diagnostic
from specc.compiler.spec.messages.expected import Model
from specc.compiler.spec.messages.keys import TAGS, Words
from specc.compiler.spec.messages.values import TYPES, FieldError
from specc.compiler.strict import Path
from specc.compiler.text.source import Source, step


def diagnostics_of(
    error: ValidationError, source: Source, models: Mapping[Path, Model], root: Model
) -> tuple[tuple[Diagnostic, ...], frozenset[Path]]:
    """Converts all Pydantic errors to diagnostics. Returns the diagnostics, and the data paths of the invalid values.

    Args:
        error: the errors.
        source: the data and its positions.
        models: the Pydantic model that is expected at each path.
        root: the Pydantic model of the whole data.
    """
    errors = [_located(details, source.data) for details in error.errors(include_url=False)]
    errors = list(_settled(errors))
    diagnostics = [diagnostic for group in _grouped(errors) for diagnostic in Words(source, models, root).say(group)]
    return tuple(diagnostics), frozenset(error.path for error in errors)


def likely_kinds(
    error: ValidationError, source: Source, models: Mapping[Path, Model], root: Model
) -> tuple[tuple[Path, str, bool], ...]:
    """Returns an entry for each value whose kind is missing or unknown: the path of the kind, the likely kind, and
    whether the name of the likely kind resembles the stated kind. A value without a likely kind, or with several likely
    kinds, is left out.

    Args:
        error: the errors.
        source: the data and its positions.
        models: the Pydantic model that is expected at each path.
        root: the Pydantic model of the whole data.
    """
    words = Words(source, models, root)
    errors = (_located(details, source.data) for details in error.errors(include_url=False))
    kinds = (words.likely_kind(fault) for fault in errors if fault.kind in TAGS)
    return tuple(kind for kind in kinds if kind is not None)


def _located(details: ErrorDetails, data: object) -> FieldError:
    path: Path = ()
    value, fork, member, entered = data, None, "", True
    parts = details["loc"]
    missing = parts[-1:] if details["type"] == "missing" else ()
    for part in parts[: len(parts) - len(missing)]:
        # The tag of a union precedes the keys of its member, so this part is the tag, even if a key has the same name.
        named = entered and isinstance(value, dict) and part == value.get("kind")
        inner = None if named else step(value, part)
        if inner is not None:
            path, value, entered = (*path, part), inner[0], True
            continue
        tag = entered and isinstance(value, dict) and part in value.values()
        if part != "[key]" and not tag and fork is None:
            fork, member = len(path), str(part)
        entered = False
    return FieldError(details, path + missing, value, fork, member)


def _settled(located: Iterable[FieldError]) -> Iterator[FieldError]:
    """Yields the errors that do not follow from other errors.

    For a union, these are the errors of members whose type matches the data. If the only matching members are Literals,
    the errors of all members of the union stay, so that the message can state every valid form.
    """
    errors = list(located)
    for fork in {(error.path[: error.fork]) for error in errors if error.fork is not None}:
        rivals = [error for error in errors if error.fork == len(fork) and error.path[: len(fork)] == fork]
        fitting = {error.member for error in rivals} - {
            error.member for error in rivals if error.path == fork and _has_wrong_type(error)
        }
        literals = {error.member for error in rivals if error.path == fork and error.choices}
        if fitting - literals:
            errors = [error for error in errors if error not in rivals or error.member in fitting]
    for error in errors:
        short = error.kind == "too_short" and isinstance(error.value, tuple)
        if not (short and len(error.value) >= error.context["min_length"]):  # type: ignore[arg-type]
            yield error


def _has_wrong_type(error: FieldError) -> bool:
    return error.kind in TYPES or (bool(error.choices) and not isinstance(error.value, str))


def _grouped(errors: Iterable[FieldError]) -> list[list[FieldError]]:
    groups: dict[object, list[FieldError]] = {}
    for error in errors:
        groups.setdefault((error.path, error.kind == "extra_forbidden"), []).append(error)
    return list(groups.values())
