"""Base classes and field types of spec models, with strict types, immutable values, and no unknown keys."""

import keyword
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from specc.compiler.records import record


class Refused(ValueError):
    """Raised by the validator of a field if the value is not valid. `hint` states how to correct the value."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def _usable(name: str) -> str:
    if name in RESERVED or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is reserved in the generated code; choose another name")
    return name


# Attributes that a module in generated code already has: the attributes of torch.nn.Module, and names that specc
# generates.
RESERVED = frozenset(
    """
    add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval
    extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict
    modules mtia named_buffers named_children named_modules named_parameters parameters register_backward_hook
    register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook
    register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_
    set_extra_state set_submodule share_memory state_dict to to_empty train training type xpu zero_grad
    begin extend features nats score skip step train_step mix parallel lanes norm_scale norm_weight norm_bias
    """.split()  # noqa: SIM905
)

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
# The name of a part, which is an attribute in the generated code.
PartName = Annotated[Name, AfterValidator(_usable)]
# The path of a learned value below its block or layer, such as `residual` or `mix.stream`.
LearnedName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}(\.[a-z][a-z0-9_]{0,63}){0,2}$")]
# The name of a node inside a part, such as `act`, or `q.norm` for the norm of q in attention.
NodeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}(\.[a-z][a-z0-9_]{0,63}){0,3}$")]


def _no_truth(value: object) -> object:
    """Rejects booleans, which Python and Pydantic treat as 0 and 1."""
    if isinstance(value, bool):
        raise PydanticKnownError("int_type", {})
    return value


def accepted_by(parse: Callable[[str], object]) -> AfterValidator:
    """Returns a validator of texts. A text is valid if `parse(text)` raises no ValueError, such as ExprError."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _check_braces(pattern: str) -> None:
    """Raises Refused if a brace of a pattern has no partner, or if braces are nested."""
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", pattern)):
        hint = "close each brace, and write no braces inside of braces, for example `*.{q,k}`"
        raise Refused(f"the braces of the pattern `{pattern}` do not form pairs", hint)


# Matches names of parameters or nodes; see pattern.py.
Pattern = Annotated[str, Field(min_length=1, max_length=256, title="pattern"), accepted_by(_check_braces)]

One = Annotated[Literal[1], BeforeValidator(_no_truth)]  # a version number that must be 1
Two = Annotated[Literal[2], BeforeValidator(_no_truth)]  # a version number that must be 2
Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
ExprText = Annotated[str, Field(min_length=1, max_length=500)]  # an expression

Path = tuple[str | int, ...]
T = TypeVar("T")


def later(default: Any) -> Any:
    """Declares a field that was added when specs were already in use.

    The canonical text of a spec omits the field if the value is `default`. A spec without the field therefore keeps its
    digest, and still matches the runs that recorded this digest.
    """
    return Field(default, exclude_if=lambda value: value == default)


@record
class Problem:
    """One problem of a spec.

    Attributes:
        path: the path of the wrong value.
        code: the code of the error.
        message: the problem.
        hint: how to fix the problem.
        related: (note, path) pairs that are shown with the problem.
        offset: the index of the wrong character, if the value is a text.
    """

    path: Path
    code: str
    message: str
    hint: str
    related: tuple[tuple[str, Path], ...] = ()
    offset: int = 0

    def moved(self, place: Callable[[Path], Path]) -> "Problem":
        related = tuple((note, place(path)) for note, path in self.related)
        return replace(self, path=place(self.path), related=related)

    def under(self, *prefix: str | int) -> "Problem":
        return self.moved(lambda path: (*prefix, *path))


class StrictModel(BaseModel):
    """The base class of spec models. Unknown keys and wrong types are errors, and values are immutable.

    `untagged` is True for the model that a union selects if the data has no tag, such as `kind`. `described` is the
    name that messages use for a file with this model, such as `the spec`.
    """

    untagged: ClassVar[bool] = False
    described: ClassVar[str] = "the spec"

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def __hash__(self) -> int:  # models that hold mappings are not cached, because mappings are not hashable
        values = (getattr(self, name) for name in type(self).model_fields)
        return hash((type(self), *(value for value in values if isinstance(value, Hashable))))

    @classmethod
    def parts_by_name(cls, data: Any) -> Iterator[tuple[Path, Any, Any]]:
        """Yields each part of `data` whose key is a name that the user chose, and not a field of this model. A yielded
        entry contains the path of the part, the type of a valid part, and the data of the part. If the part does not
        state its tag, such as `kind`, the tag is added to the data in the entry."""
        yield from ()

    @staticmethod
    def instead() -> Mapping[str, str]:
        """Returns keys of other tools that users could expect in this model. Each key has a hint that names the
        alternative in a spec."""
        return {}

    def stated(self) -> dict[str, Any]:
        """Returns the fields that were set, as JSON data. `model_dump` is not used, because Pydantic would have to
        build a serializer for each class."""
        known = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        return {name: _data(value) for name, value in (known | (self.model_extra or {})).items()}

    def problems(self) -> Iterator[Problem]:
        """Yields the problems that involve several fields of this model. Paths are relative to the model."""
        yield from ()


def _data(value: Any) -> Any:
    if isinstance(value, StrictModel):
        return value.stated()
    if isinstance(value, Mapping):
        return {key: _data(inner) for key, inner in value.items()}
    return list(map(_data, value)) if isinstance(value, tuple | list) else value


def as_tuples(value: Any) -> Any:
    """Returns JSON data with tuples in place of lists, because Pydantic's strict mode accepts a list for a tuple field
    only in JSON text."""
    if isinstance(value, dict):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def values_in(part: object, kind: type[T], path: Path = ()) -> Iterator[tuple[Path, T]]:
    """Yields every value of the type `kind` in a part of a spec, with the path of the value."""
    entries: Iterable[tuple[str | int, object]] = ()
    if isinstance(part, kind):
        yield path, part
    elif isinstance(part, StrictModel):
        entries = ((info.alias or name, getattr(part, name)) for name, info in type(part).model_fields.items())
    elif isinstance(part, Mapping):
        entries = part.items()
    elif isinstance(part, tuple):
        entries = enumerate(part)
    for key, inner in entries:
        yield from values_in(inner, kind, (*path, key))


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def tag_of(model: type[BaseModel], field: str) -> str | None:
    """Returns the tag of a model: the only value of the `Literal` type of `field`. Returns None if the model has no
    such field, or if the type of the field is not a `Literal` with a single text."""
    info = model.model_fields.get(field)
    values: tuple[Any, ...] = get_args(info.annotation) if info is not None else ()
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None
