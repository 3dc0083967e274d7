"""Messages and hints for a single invalid value, from Pydantic's errors and the limits of the field."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

from specc.compiler.errors import quote
from specc.compiler.spec.messages.expected import alternatives, item_of, joined, list_words, nearest, range_of, size_of
from specc.compiler.strict import Path

# The kinds of Pydantic error that only state that a value has the wrong type.
TYPES: Mapping[str, str] = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing",
}
_LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("more than {}", "gt"),
    "greater_than_equal": ("at least {}", "ge"),
    "less_than": ("less than {}", "lt"),
    "less_than_equal": ("at most {}", "le"),
    "string_too_short": ("text of at least {} characters", "min_length"),
    "string_too_long": ("text of at most {} characters", "max_length"),
    "too_short": ("a list of length at least {}", "min_length"),
    "too_long": ("a list of length at most {}", "max_length"),
}
_NAME = r"^[a-z][a-z0-9_]{0,63}$"
_NODE = r"^[a-z][a-z0-9_]{0,63}(\.[a-z][a-z0-9_]{0,63}){0,3}$"
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")


class FieldError(NamedTuple):
    """One Pydantic error and its path in the data.

    If the error is about one member of an untagged union, `member` is that member, and `fork` is the length of the
    union's path.
    """

    details: ErrorDetails
    path: Path
    value: object
    fork: int | None = None
    member: str = ""

    @property
    def kind(self) -> str:
        return self.details["type"]

    @property
    def context(self) -> Mapping[str, Any]:
        return self.details.get("ctx", {})

    @property
    def choices(self) -> list[str]:
        expected = str(self.context.get("expected", "")) if self.kind == "literal_error" else ""
        return re.findall(r"'([^']*)'", expected) or ([expected] if expected else [])


def wrong_type(group: list[FieldError], annotation: Any, beside: tuple[object, ...] = ()) -> tuple[str, str]:
    """Returns the message and the hint for a value of the wrong type.

    Args:
        group: the errors, one for each member of the expected type.
        annotation: the expected type.
        beside: the items of the list that contains the value. Empty if no list contains the value.
    """
    words: list[str] = []
    for error in group:
        of_list = error.kind == "tuple_type"
        words += [quote(choice) for choice in error.choices] or [
            list_words(annotation) if of_list else TYPES[error.kind]
        ]
    value, form = group[0].value, joined(dict.fromkeys(words))
    return f"must be {form}, not {_description(value)}", _remedy(value, words, annotation, beside) or f"write {form}"


def _remedy(value: object, words: list[str], annotation: Any, beside: tuple[object, ...]) -> str:
    numbers = "a whole number" in words or "a number" in words
    if isinstance(value, str):
        plain = value.replace("_", "")
        if numbers and _NUMBER.fullmatch(value):
            return f"write {plain} without quotes" if plain == value else f"write {plain}"
        if "true or false" in words and value.lower() in ("yes", "on", "true"):
            return "write true"
        if "true or false" in words and value.lower() in ("no", "off", "false"):
            return "write false"
        near = nearest(value, [word.strip("`") for word in words if word.startswith("`")])
        if near:
            return f"did you mean {quote(near)}?"
    if isinstance(value, float) and value.is_integer() and numbers:
        return f"write {int(value)}"
    if value is None:
        return "write a value, or remove the key"
    if "text" in words and not numbers and isinstance(value, bool | int | float):
        return f'put it in quotes: "{_description(value)}"'
    if any(word.startswith("a list") for word in words) and isinstance(value, bool | int | float | str):
        item = item_of(annotation, 0)
        size, each = size_of(annotation), size_of(item)
        if not isinstance(value, str) and str in alternatives(item):
            return ""
        if not size and not each:
            return f"put it in brackets: [{_plain(value)}]"
        if isinstance(value, str) or (size and not beside):
            return f"write a list of {size}" if size else f"write a list of lists of {each}"
        if size and size == len(beside) and not any(isinstance(item, tuple | dict) for item in beside):
            return f"put all of it in brackets: [[{', '.join(map(_plain, beside))}]]"
        point = f"[{', '.join(['0'] * ((size or each) - 1) + [_plain(value)])}]"  # schedules start at 0
        return f"put it in brackets: {point if size else f'[{point}]'}"
    return ""


def _plain(value: object) -> str:
    return quote(value).strip("`")


def wrong_value(group: list[FieldError], annotation: Any) -> tuple[str, str]:
    first = group[0]
    form = joined(dict.fromkeys(word for error in group for word in _limits(error)))
    return f"must be {form}, not {_description(first.value)}", _way_out(group, annotation) or f"change it to {form}"


def _way_out(group: list[FieldError], annotation: Any) -> str:
    first = group[0]
    if first.kind == "too_short":
        return "add an item"
    if first.kind == "too_long":
        return "remove items"
    if isinstance(first.value, str):
        near = nearest(first.value, [choice for error in group for choice in error.choices])
        if near:
            return f"did you mean {quote(near)}?"
        word = re.sub(r"[^a-z0-9_]+", "_", first.value.lower())[:64].lstrip("_0123456789")
        if first.context.get("pattern") == _NAME and re.fullmatch(_NAME, word):
            return f"e.g. {quote(word)}"
    allowed = range_of(annotation, first.value) if first.kind in _LIMITS else ""
    return f"write a number that is {allowed}" if allowed else ""


def _limits(error: FieldError) -> list[str]:
    if error.choices:
        return [quote(choice) for choice in error.choices]
    if error.kind in _LIMITS:
        form, key = _LIMITS[error.kind]
        limit = error.context[key]
        return [form.format(f"{limit:g}" if isinstance(limit, float) else limit)]
    if error.kind == "finite_number":
        return ["a finite number"]
    pattern = error.context.get("pattern")
    if pattern == _NAME:
        return ["lower-case letters, digits and _, starting with a letter"]
    if pattern == _NODE:
        return ["a node's name, such as `act` or `q.norm`"]
    return [f"text like {pattern}" if pattern else error.details["msg"].removeprefix("Input should be ")]


def _description(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, tuple):
        return f"a list of length {len(value)}"
    if isinstance(value, dict):
        return "a mapping"
    return f"the text {quote(value)}" if isinstance(value, str) else _plain(value)
