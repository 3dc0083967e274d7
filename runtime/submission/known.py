"""Stands, in a submission, for what it has from the compiler or does without: the resolved spec, text as data, the
user's folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.record import HINT, RECORD, ShardEntry, ShardRecord, SplitEntry


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
