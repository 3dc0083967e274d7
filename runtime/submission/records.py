"""A minimal replacement for Pydantic in a submission.

The settings of a submission were validated at export. The only external input is the quantization rules in a weights
file. The fields of a rule are checked against the ranges in the annotations of its class.
"""

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, get_args, get_type_hints


class ValidationError(ValueError):
    """Raised if a field is unknown, missing, or out of its range."""

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": (), "msg": str(self)}]


class _Field:
    """A field: its default, its range, and the condition under which `model_dump` omits it."""

    def __init__(self, default: Any = ..., **settings: Any) -> None:
        self.default, self.settings = default, settings


def Field(default: Any = ..., **settings: Any) -> Any:
    return _Field(default, **settings)


def ConfigDict(**settings: Any) -> dict[str, Any]:
    return settings


_BOUNDS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}


class BaseModel:
    """A frozen record. Its fields are the annotations of its class."""

    model_fields: ClassVar[dict[str, Any]] = {}
    _left_out: ClassVar[dict[str, Any]] = {}
    _ranges: ClassVar[dict[str, Mapping[str, Any]]] = {}

    def __init_subclass__(cls) -> None:
        bases = [base for base in reversed(cls.__mro__) if base is not BaseModel]
        fields = {name: ... for base in bases for name in inspect.get_annotations(base)}
        left_out = {}
        for name in fields:
            value = getattr(cls, name, ...)
            if isinstance(value, _Field):
                if "exclude_if" in value.settings:
                    left_out[name] = value.settings["exclude_if"]
                value = value.default
                setattr(cls, name, value)
            fields[name] = value
        cls.model_fields, cls._left_out = dict(fields), {**cls._left_out, **left_out}
        hints = get_type_hints(cls, include_extras=True)
        ranges = {n: m.settings for n in fields for m in get_args(hints.get(n)) if isinstance(m, _Field)}
        cls._ranges = {**cls._ranges, **ranges}

    @classmethod
    def model_construct(cls) -> Self:
        return cls()

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - self.model_fields.keys():
            raise ValidationError(f"{type(self).__name__} has no field {min(unknown)}")
        for name, default in self.model_fields.items():
            value = values.get(name, default)
            if value is ...:
                raise ValidationError(f"{type(self).__name__} has no value for {name}")
            self._check(name, value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "model_fields_set", set(values))

    def _check(self, name: str, value: Any) -> None:
        limits = self._ranges.get(name, {})
        for bound, (sign, fits) in _BOUNDS.items():
            if bound not in limits:
                continue
            kinds = int if name in ("bits", "correction_rank") else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value, limits[bound]):
                raise ValidationError(f"{name} is {value!r}, which is not {sign} {limits[bound]}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, getattr(self, name)) for name in self.model_fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, BaseModel) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(self)))

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        return type(self)(**{**dict(self), **update})

    def model_dump(self) -> dict[str, Any]:
        return {name: value for name, value in self if not (name in self._left_out and self._left_out[name](value))}
