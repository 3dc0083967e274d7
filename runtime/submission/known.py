"""Stands, in a submission, for what it has from the compiler or does without: the resolved spec, text as data, the
user's folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime.artifact import artifact
from specc.runtime.artifact.codecs import Codec
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.record import HINT, RECORD, ShardEntry, ShardRecord, SplitEntry
from specc.runtime.optim.update_rule import UpdateRule
from specc.runtime.submission import plan


def resolved(spec: object, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """The resolved spec with one rule a parameter, as data."""
    data: dict[str, Any] = json.loads(plan.SPEC)
    data["quant"]["rules"] = [{"match": name, **scheme.model_dump()} for name, scheme in schemes.items()]
    return data


def rule_of(spec: OptimizerSpec) -> type[UpdateRule[Any]]:
    """The update rule of a kind of optimizer; the plan holds those of its spec."""
    return plan.RULES[spec.kind]


def canonical(data: Mapping[str, Any]) -> str:
    """As the compiler's: one text for one spec."""
    return json.dumps(data, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def measured_bytes(**words: Any) -> int:
    """As `artifact.measured_bytes`, by the codec of the submission."""
    return artifact.measured_bytes(**words, codec=Codec(plan.CODEC))


def described(schemes: object, tensors: object) -> bytes:
    """No table of arrays: a submission multiplies none as it is stored."""
    return b""


def open_cached(source: object, *how: object) -> NoReturn:
    raise DataError(f"{source} holds no token shards", "give a folder of NAME_train_*.bin and NAME_val_*.bin")


def read_record(folder: Path) -> ShardRecord | None:
    """As the record's own, for the fields that shards are held to. Raises DataIntegrityError for what is none, or where
    a pack or fetch has not completed the folder."""
    path = folder / RECORD
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataIntegrityError(f"{path}: {error.strerror}", HINT) from None
    if not text:
        raise DataIntegrityError(f"{folder}: was never completed ({RECORD} is empty)", "pack or fetch it again")
    try:
        data = json.loads(text)
        for split, entry in data["splits"].items():
            shards = tuple(ShardEntry(**one) for one in entry["shards"])
            data["splits"][split] = SplitEntry(**{**entry, "shards": shards})
        return ShardRecord(**data)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DataIntegrityError(f"{path}: unreadable", HINT) from None


def user_cache_dir(name: str) -> str:
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", name))
