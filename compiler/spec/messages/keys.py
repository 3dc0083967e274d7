"""Converts Pydantic's errors to diagnostics about the keys of the spec."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from specc.compiler.changing_values import Schedule
from specc.compiler.errors import Diagnostic, one_of, quote
from specc.compiler.expr import ExprError
from specc.compiler.spec.messages.expected import (
    Model,
    alternatives,
    dotted,
    item_of,
    models_in,
    nearest,
    tags_of,
    wanted,
)
from specc.compiler.spec.messages.values import TYPES, FieldError, wrong_type, wrong_value
from specc.compiler.strict import Path, Refused, StrictModel, keys_of, tag_of
from specc.compiler.text.source import Place, Source

TAGS = ("union_tag_not_found", "union_tag_invalid")  # the errors of a missing and of an unknown kind


class Words:
    """Writes diagnostics about `source`. `models` maps each path to the Pydantic model that the spec expects there."""

    def __init__(self, source: Source, models: Mapping[Path, Model], root: Model) -> None:
        self.source, self.models, self.root = source, models, root

    def say(self, group: list[FieldError]) -> Iterator[Diagnostic]:
        special: Mapping[str, Callable[[FieldError], Iterator[Diagnostic]]] = {
            "extra_forbidden": self._unknown_key,
            "missing": self._missing_key,
            "union_tag_not_found": self._missing_tag,
            "union_tag_invalid": self._unknown_tag,
            "value_error": self._refused,
        }
        for error in group:
            if error.kind in special:
                yield from special[error.kind](error)
                return
        path = group[0].path
        limits = [error for error in group if error.kind not in TYPES]
        if not limits or (len(limits) < len(group) and all(error.choices for error in limits)):
            beside = self._data(path[:-1]) if path and isinstance(path[-1], int) else ()
            problem, hint = wrong_type(group, self._annotation(path), beside)
            if isinstance(group[0].value, dict) and "at" in group[0].value:
                hint = f"only {', '.join(_scheduled(self.root))} may have a schedule"
            yield self._at(self.source.place(path), "S103", f"{self._name(path)} {problem}", hint)
        elif self._is_tag(limits[0]):
            yield self._no_kind(path, limits[0].choices)
        else:
            problem, hint = wrong_value(limits, self._annotation(path))
            yield self._at(self.source.place(path), "S104", f"{self._name(path)} {problem}", hint)

    def _at(self, place: Place, code: str, message: str, hint: str) -> Diagnostic:
        return Diagnostic(code, message, hint, place.file, place.mark)

    def _name(self, path: Path) -> str:
        words = [i for i, part in enumerate(path) if isinstance(part, str)]
        return self._place(path[words[-1] :] if words else path)

    def _place(self, path: Path) -> str:
        return quote(dotted(path)) if path else self.root.described

    def _data(self, path: Path) -> Any:
        value: Any = self.source.data
        for part in path:
            value = value[part]
        return value

    def _annotation(self, path: Path) -> Any:
        if path in self.models or not path:
            return None
        *outer, last = path
        if isinstance(last, int):
            return item_of(self._annotation(tuple(outer)), last)
        model = self.models.get(tuple(outer))
        info = keys_of(model).get(last) if model is not None else None
        return None if info is None else Annotated[info.annotation, info]

    # keys

    def _unknown_key(self, error: FieldError) -> Iterator[Diagnostic]:
        holder, key = error.path[:-1], str(error.path[-1])
        model, present = self.models.get(holder, self.root), self._data(holder)
        keys = keys_of(model)
        near = nearest(key, [name for name in keys if name not in present])
        hints = [f"did you mean {quote(near)}?"] if near else []
        homes = [path for path, other in self._offers() if path != holder and key in keys_of(other)]
        elsewhere = [path for path in homes if not _in_sibling(path, holder)]
        # Several sections may have the key. In a layer or an optimizer, no other section is suggested, because the key
        # may belong in this section.
        is_kind = (
            bool(holder) and isinstance(holder[-1], int) and any(tag_of(model, name) for name in model.model_fields)
        )
        if elsewhere and not (is_kind and sum(key in keys_of(model) for model in _models(self.root)) > 1):
            home = self._beside(min(elsewhere, key=lambda path: _apart(path, holder)), holder)
            hints.insert(0, f"{quote(key)} belongs {f'under {self._place(home)}' if home else 'at the top'}")
        near_models = (other for path, other in self.models.items() if path[:1] == holder[:1] or not holder)
        instead = next((other.instead()[key] for other in near_models if key in other.instead()), None)
        if instead is not None:
            hints = [*(hints if not holder else ()), instead]
        elif not hints:
            twin = nearest(key, keys)
            hints = [f"did you mean {quote(twin)}?" if twin else f"valid keys are {', '.join(keys)}"]
        message = f"{quote(key)} is not a valid key of {self._place(holder)}"
        yield self._at(self.source.key(error.path), "S101", message, "; or ".join(hints))

    def _beside(self, home: Path, holder: Path) -> Path:
        """Returns the path of the part that has the name of `home` and stands beside `holder`, if `holder` is a part
        that changes one of the list of `home`. Otherwise, returns `home`."""
        outer = self.models.get(holder[:-1])
        changes = outer is not None and bool(holder) and holder[-1] not in keys_of(outer)
        if not changes or not home or not isinstance(home[-1], int) or home[:-2] != holder[:-3]:
            return home
        data = self._data(home)
        return (*holder[:-1], data.get("name") or data["kind"])

    def _offers(self) -> Iterator[tuple[Path, Model]]:
        """Yields the path and the Pydantic model of every section of the data, and of every section that the data could
        have."""
        for path, model in self.models.items():
            yield path, model
            for key, info in keys_of(model).items():
                inner = models_in(info.annotation)
                if len(inner) == 1 and (*path, key) not in self.models:
                    yield (*path, key), inner[0]

    def _missing_key(self, error: FieldError) -> Iterator[Diagnostic]:
        holder, key = error.path[:-1], error.path[-1]
        if isinstance(key, int):
            count = len(self._data(holder))
            message = f"{self._name(holder)} has too few items, only {count}"
            yield self._at(self.source.place(holder), "S104", message, f"add item {key + 1}")
            return
        model = self.models.get(holder)
        known = keys_of(model) if model is not None else {}
        # A misspelled key is reported as unknown, not also as missing.
        data = self._data(holder)
        # If the data is a list where a mapping is expected, the data has no keys
        present = data if isinstance(data, Mapping) else {}
        absent = [name for name in known if name not in present]
        if any(nearest(str(other), absent) == key for other in present if other not in known):
            return
        form = wanted(known[key].annotation) if key in known else "a value"
        yield self._missing(holder, key, form)

    def _missing_tag(self, error: FieldError) -> Iterator[Diagnostic]:
        key = _discriminator(error)
        models = models_in(self._annotation(error.path))
        words, known = tags_of(models, key), {name for model in models for name in keys_of(model)}
        missing = self._missing(error.path, key, one_of(words) if words else "its value")
        data = error.value if isinstance(error.value, Mapping) else {}
        for other in (other for other in data if other not in known):
            if not nearest(str(other), [key]) and data[other] not in words:
                continue
            place, hint = self.source.key((*error.path, other)), f"write {quote(key)} in place of {quote(other)}"
            yield replace(missing, hint=hint, file=place.file, mark=place.mark)
            return
        yield missing

    def _missing(self, holder: Path, key: str, form: str) -> Diagnostic:
        place = self.source.place(holder) if holder else self.source.value(())
        message = f"{self._place(holder)} needs the key {quote(key)}"
        return self._at(place, "S102", message, f"add `{key}:` with {form}")

    # kinds

    def _is_tag(self, error: FieldError) -> bool:
        model = self.models.get(error.path[:-1])
        return model is not None and bool(error.choices) and tag_of(model, str(error.path[-1])) is not None

    def _unknown_tag(self, error: FieldError) -> Iterator[Diagnostic]:
        words = re.findall(r"'([^']*)'", str(error.context["expected_tags"]))
        yield self._no_kind((*error.path, _discriminator(error)), words)

    def likely_kind(self, error: FieldError) -> tuple[Path, str, bool] | None:
        """Returns the likely kind of a value whose kind is missing or unknown. The result is the path of the kind, the
        likely kind, and whether the name of the likely kind resembles the stated kind.

        A kind whose name resembles the stated kind is likely. If no name is similar, the kinds are compared with the
        keys of the value. A kind fits if it accepts all keys of the value, and if the value has all keys that the kind
        requires. This comparison ignores keys of the value that no kind accepts. A single fitting kind is likely. If
        several kinds fit, a kind is likely if every other fitting kind accepts all keys of this kind. Returns None if
        no kind is likely.
        """
        key, value = _discriminator(error), error.value
        if not isinstance(value, Mapping):
            return None
        models = models_in(self._annotation(error.path))
        kinds = {tag: keys_of(model) for model in models for tag in tags_of([model], key)}
        stated = value.get(key)
        kind = near = nearest(stated, kinds) if isinstance(stated, str) else None
        if kind is None:
            known = {name for keys in kinds.values() for name in keys} & {key, *value}
            fitting = {tag: set(keys) for tag, keys in kinds.items() if _needed(keys) <= known <= set(keys)}
            shared = [tag for tag, keys in fitting.items() if all(keys <= other for other in fitting.values())]
            kind = shared[0] if len(shared) == 1 else None
        return ((*error.path, key), kind, near is not None) if kind is not None else None

    def _no_kind(self, path: Path, words: list[str]) -> Diagnostic:
        kind = self._data(path)
        near = nearest(kind, words) if isinstance(kind, str) else None
        hints = [f"did you mean {quote(near)}?"] if near else []
        if not near or len(words) > 1:
            hints.append(f"choose {one_of(words)}")
        message = f"{self._place(path[:-1])} has an unknown {path[-1]}, {quote(kind)}"
        return self._at(self.source.place(path), "S105", message, " ".join(hints))

    # errors that the validator of a field raises

    def _refused(self, error: FieldError) -> Iterator[Diagnostic]:
        cause, name = error.context["error"], self._name(error.path)
        if isinstance(cause, ExprError):
            place = self.source.inside(error.path, cause.column)
            hint = cause.hint or "check the expression"
            yield self._at(place, "S107", f"{name}: {cause.message}", hint)
        else:
            hint = cause.hint if isinstance(cause, Refused) else "correct the value"
            yield self._at(self.source.place(error.path), "S106", f"{name}: {cause}", hint)


def _needed(keys: Mapping[str, FieldInfo]) -> set[str]:
    return {name for name, info in keys.items() if info.is_required()}


def _discriminator(error: FieldError) -> str:
    return str(error.context["discriminator"]).strip("'")


def _in_sibling(path: Path, holder: Path) -> bool:
    *outer, item = holder or ("",)
    here = path[: len(holder)]
    return isinstance(item, int) and here[:-1] == tuple(outer) and here[-1:] != (item,) and len(here) == len(holder)


@cache
def _models(root: Model) -> tuple[Model, ...]:
    """Returns all Pydantic models that data of the model `root` can contain, in any section, and the base classes of
    these models."""
    models: dict[Model, None] = {}
    types: list[Any] = [root]
    for type in types:  # the list grows during the loop
        for member in alternatives(type):
            if get_origin(member) in (tuple, dict):
                types += get_args(member)
        for model in set(models_in(type)) - models.keys():
            models |= dict.fromkeys(base for base in model.__mro__ if issubclass(base, StrictModel))
            types += (info.annotation for info in model.model_fields.values())
    return tuple(models)


@cache
def _scheduled(root: Model) -> tuple[str, ...]:
    return tuple(sorted({name for model in _models(root) for name, info in keys_of(model).items() if _takes(info)}))


def _takes(info: FieldInfo) -> bool:
    return any(issubclass(model, Schedule) for model in models_in(info.annotation))


def _apart(path: Path, other: Path) -> int:
    shared = 0
    while shared < min(len(path), len(other)) and path[shared] == other[shared]:
        shared += 1
    return len(path) + len(other) - 2 * shared
