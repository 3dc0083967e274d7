"""The base of every spec model: strict, frozen, and no key is ever ignored."""

import keyword
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError


def _usable(name: str) -> str:
    if name in RESERVED or keyword.iskeyword(name):
        raise ValueError(f"{name!r} means something else in the generated code; choose another name")
    return name


# What a module of the generated code has by itself: the methods of torch.nn.Module, and specc's own words.
RESERVED = frozenset(
    [
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "call_super_init",
        "children",
        "compile",
        "cpu",
        "cuda",
        "double",
        "dump_patches",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_module",
        "register_parameter",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "set_extra_state",
        "set_submodule",
        "share_memory",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "training",
        "type",
        "xpu",
        "zero_grad",
        "begin",
        "extend",
        "features",
        "nats",
        "score",
        "skip",
        "step",
        "train_step",
        "mix",
        "parallel",
        "lanes",
        "norm_scale",
        "norm_weight",
        "norm_bias",
    ]
)

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
# The name of a part, which the generated code uses as an attribute.
PartName = Annotated[Name, AfterValidator(_usable)]
# A node inside a part, such as `act`, or `q.norm` for the norm of an attention's q.
NodeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}(\.[a-z][a-z0-9_]{0,63}){0,3}$")]

# Covers names of parameters or nodes; see pattern.py.
Pattern = Annotated[str, Field(min_length=1, max_length=256)]


def _no_truth(value: object) -> object:
    """Python takes True for 1, and with it pydantic; YAML and JSON Schema do not."""
    if isinstance(value, bool):
        raise PydanticKnownError("literal_error", {"expected": "1"})
    return value


One = Annotated[Literal[1], BeforeValidator(_no_truth)]  # a version
Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]

Path = tuple[str | int, ...]


def later(default: Any) -> Any:
    """A field that was added when specs were in use already. Where it has its `default`, the canonical text of a spec
    leaves it out: a spec that does not use it keeps its digest, and with it its runs."""
    return Field(default, exclude_if=lambda value: value == default)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a spec. `path` leads to the value at fault; `related` are (note, path) pairs to show
    beside it."""

    path: Path
    code: str
    message: str
    hint: str
    related: tuple[tuple[str, Path], ...] = ()

    def under(self, *prefix: str | int) -> "Problem":
        """The same problem, seen from further up the spec."""
        related = tuple((note, (*prefix, *path)) for note, path in self.related)
        return Problem((*prefix, *self.path), self.code, self.message, self.hint, related)


class StrictModel(BaseModel):
    """Unknown keys and wrong types are errors; values are immutable.

    `untagged` says that a section which does not state its kind is this one.
    """

    untagged: ClassVar[bool] = False

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    def problems(self) -> Iterator[Problem]:
        """The problems across this model's own fields; paths are relative to it."""
        yield from ()


def tag_of(model: type[BaseModel], field: str) -> str | None:
    """The single word of a `Literal` field, by which a union selects a member; None where there is none."""
    info = model.model_fields.get(field)
    values: tuple[Any, ...] = get_args(info.annotation) if info is not None else ()
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None
