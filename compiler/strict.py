"""The base of every spec model: strict, frozen, and no key is ever ignored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, le=1)]

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a spec. `path` leads to the value at fault; `related` are (note, path) pairs to show beside it."""

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
    """Unknown keys and wrong types are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """What is wrong across this model's own fields; paths are relative to it."""
        yield from ()


def tag_of(model: type[BaseModel], field: str) -> str | None:
    """The single word of a `Literal` field, by which a union tells its members apart; None where there is none."""
    info = model.model_fields.get(field)
    values: tuple[Any, ...] = get_args(info.annotation) if info is not None else ()
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None
