"""The Pydantic model or type that a spec expects at each path, and the nearest match of a misspelled word."""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from specc.compiler.catalog import Kinds
from specc.compiler.errors import quote
from specc.compiler.strict import Path, StrictModel, keys_of, tag_of

M = TypeVar("M", bound=StrictModel)
Model = type[StrictModel]


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yields the members of a union, with `Annotated` removed. For a type that is not a union, yields this type."""
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    elif isinstance(annotation, Kinds):
        yield from annotation.models
    else:
        yield annotation


def models_in(annotation: Any) -> list[Model]:
    return [
        member for member in alternatives(annotation) if isinstance(member, type) and issubclass(member, StrictModel)
    ]


def places(annotation: Any, data: object, path: Path = ()) -> Iterator[tuple[Path, Model]]:
    """Yields every path of `data` at which the type `annotation` expects a Pydantic model, and the model. Outer paths
    come first.

    For a union, yields the member whose tag is in the data, or else the member that needs no tag. If the union has
    neither, yields nothing for the path.
    """
    if isinstance(data, dict):
        model = _chosen(models_in(annotation), data)
        if model is not None:
            yield path, model
            for key, info in keys_of(model).items():
                if key in data:
                    yield from places(info.annotation, data[key], (*path, key))
            for inner, type, fields in model.parts_by_name(data):
                yield from places(type, fields, (*path, *inner))
        for member in alternatives(annotation):
            if get_origin(member) is dict:
                for key, value in data.items():
                    yield from places(get_args(member)[1], value, (*path, key))
    elif isinstance(data, tuple):
        for i, value in enumerate(data):
            yield from places(item_of(annotation, i), value, (*path, i))


def _chosen(models: list[Model], data: Mapping[str, object]) -> Model | None:
    for model in models:
        for name in model.model_fields:
            tag = tag_of(model, name)
            if tag is not None and data.get(name) == tag:
                return model
    for model in models:
        if model.untagged and not any(tag_of(model, name) and name in data for name in model.model_fields):
            return model
    untagged = [model for model in models if not any(tag_of(model, name) for name in model.model_fields)]
    if len(models) == 1:
        return models[0]
    return max(untagged, key=lambda model: len(keys_of(model).keys() & data.keys()), default=None)


def tags_of(models: Iterable[Model], key: str) -> list[str]:
    return [tag for model in models if (tag := tag_of(model, key)) is not None]


def item_of(annotation: Any, index: int) -> Any:
    for member in alternatives(annotation):
        if get_origin(member) is tuple:
            members = get_args(member)
            return members[0] if members[-1] is Ellipsis else members[min(index, len(members) - 1)]
    return None


def size_of(annotation: Any) -> int:
    members = next(
        (get_args(member) for member in alternatives(annotation) if get_origin(member) is tuple), (Ellipsis,)
    )
    return 0 if members[-1] is Ellipsis else len(members)


def list_words(annotation: Any) -> str:
    """Returns `a list`. If the items have a title, returns a text such as `a list of patterns`."""
    item = item_of(annotation, 0)
    marks = get_args(item)[1:] if get_origin(item) is Annotated else ()
    titles = [mark.title for mark in marks if isinstance(mark, FieldInfo) and mark.title]
    return f"a list of {titles[0]}s" if titles else "a list"


def range_of(annotation: Any, value: object = 0) -> str:
    """Describes the numbers that a type allows, such as `at least 2 and at most 8`. The text is empty if the type
    allows all numbers. The limit of 32 bits is left out unless `value` exceeds this limit."""
    size = abs(value) if isinstance(value, int | float) else 0
    limits: dict[str, float] = {}
    for mark in _metadata(annotation):
        limits |= {name: getattr(mark, name) for name in ("gt", "ge", "lt", "le") if hasattr(mark, name)}
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    texts = [f"{words[name]} {limit}" for name, limit in limits.items() if abs(limit) < max(size, 2**31 - 1)]
    return " and ".join(texts)


def _metadata(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        for mark in marks:
            yield from mark.metadata if isinstance(mark, FieldInfo) else (mark,)
        yield from _metadata(inner)
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _metadata(member)


def wanted(annotation: Any) -> str:
    """Describes the values that a field accepts, such as `a whole number` or `text or a mapping`."""
    words: list[str] = []
    for member in alternatives(annotation):
        if get_origin(member) is Literal:
            words += [quote(choice) for choice in get_args(member)]
        elif isinstance(member, type) and issubclass(member, StrictModel):
            words.append("a mapping")
        elif member is not type(None):
            words.append(_WORDS.get(get_origin(member) or member, "a value"))
    return joined(dict.fromkeys(words))


_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list",
    dict: "a mapping",
}


def joined(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that `word` most likely misspells, or None if all differ too much.

    A choice matches if it differs by a few edits, is similar as a whole, is a prefix of `word`, or begins with `word`.
    """
    scored = [(_slips(word, choice), -_likeness(word, choice), choice) for choice in choices]
    slips, likeness, best = min(scored, default=(99, 0.0, ""))
    if slips <= max(1, len(best) // 3) or -likeness >= 0.75:
        return best
    return next((choice for _, _, choice in sorted(scored) if _extends(word, choice)), None)


def _extends(word: str, other: str) -> bool:
    short, long = sorted((word.lower(), other.lower()), key=len)
    return len(short) > 2 and long.startswith(short)


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word.lower(), other.lower()).ratio()


def _slips(word: str, other: str) -> int:
    """Returns the edit distance of two words. A swap of two neighboring letters is one edit (Damerau, 1964).

    Returns 99 if the lengths differ by more than 3 or a word is longer than 64 characters.
    """
    if abs(len(word) - len(other)) > 3 or len(word) > 64:
        return 99
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(word, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and word[i - 2] == b:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
