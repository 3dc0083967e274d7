"""Replacements for functions of specc in a submission, which lacks the compiler, the text tokenizers and Pydantic."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from pydantic import ValidationError

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime.data.errors import DataError
from specc.runtime.optim.update_rule import UpdateRule
from specc.runtime.submission import plan

if TYPE_CHECKING:
    from specc.runtime.data.shards.record import ShardRecord

SHARDS = "give a folder of NAME_train_*.bin and NAME_val_*.bin"


T = TypeVar("T")


def record(cls: type[T]) -> type[T]:
    return dataclass(frozen=True)(cls)


def rule_of(spec: OptimizerSpec) -> type[UpdateRule[OptimizerSpec]]:
    return plan.RULES[spec.kind]


def owners(optimizers: object, shapes: Mapping[str, object]) -> Mapping[str, int]:
    """Returns the index of the optimizer of each parameter. The compiler determined these indices at export."""
    assigned = ((param.name, param.optimizer) for param in next(iter(plan.PARAMS.values())))
    index = {name: i for name, i in assigned if i is not None}
    return {name: index[name] for name in shapes}


def formula(most: float = 1.0) -> None:
    """Replaces the validator of formulas. The spec was validated at export."""


def formula_at(text: str, t: float) -> float:
    """Returns the value of a formula of the spec at `t`. Raises NameError for functions that `math` does not have."""
    names = {"t": t, "min": min, "max": max, "abs": abs, **vars(math)}
    return float(eval(text, {"__builtins__": {}}, names))  # the text is trusted, because it is a part of this file


def unused(*arguments: object) -> NoReturn:
    """Replaces a function that is never called for this spec."""
    raise NotImplementedError("the spec of this submission does not call this function")


def nothing(*arguments: object) -> None:
    """Replaces `compile_ahead` if the model has no CUDA C++ sources. Replaces `in_order` if the model recomputes
    nothing.
    """


class NoBuffers:
    """Replaces a class that writes to buffers of the model, for a model without such buffers. Does nothing."""

    def __init__(self, *arguments: object) -> None: ...

    def begin(self, *arguments: object) -> None: ...

    def write(self, *arguments: object) -> None: ...

    def update(self, *arguments: object) -> None: ...

    def restore(self, *arguments: object) -> None: ...

    def state(self) -> dict[str, object]:
        return {}


def open_cached(source: object, *how: object) -> NoReturn:
    raise DataError(f"{source} contains no token shards", SHARDS)


def missing_source(path: Path) -> DataError:
    """Returns the error for a folder that does not exist."""
    return DataError(f"{path}: no such file or folder", SHARDS)


def parsed(text: bytes) -> "ShardRecord":
    """Parses shards.json without Pydantic. Raises ValidationError if the text is invalid."""
    from specc.runtime.data.shards.record import (
        ShardEntry,
        ShardRecord,
        SplitEntry,
    )  # imported here, because the imported module imports this module

    try:
        data = json.loads(text)
        for split, entry in data["splits"].items():
            shards = tuple(ShardEntry(**shard) for shard in entry["shards"])
            data["splits"][split] = SplitEntry(**{**entry, "shards": shards})
        return ShardRecord(**data)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValidationError("unreadable") from error


def in_words(error: ValidationError) -> str:
    return f"the text is {error}"


def user_cache_dir(name: str) -> str:
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", name))
