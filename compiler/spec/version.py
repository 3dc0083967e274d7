"""The version of a spec. Old specs are rewritten by migrate.py, a separate module that few commands import."""

from collections.abc import Mapping
from typing import Any

from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.text.shell import shell_path
from specc.compiler.text.source import Source

VERSION = 2


def of_version_1(data: Any) -> bool:
    return isinstance(data, Mapping) and data.get("spec_version") == 1 and not isinstance(data["spec_version"], bool)


def has_version(source: Source) -> bool:
    return isinstance(source.data, Mapping) and source.data.get("spec_version") == VERSION


def has_tf32(data: Any) -> bool:
    return isinstance(data, Mapping) and isinstance(train := data.get("train"), Mapping) and "tf32" in train


def refuse_old(source: Source) -> None:
    """Raises SpecError for a spec of version 1 or with an old key. The hint names the command that rewrites the
    spec."""
    hint = f"run `specc migrate {shell_path(source.file)}`, which rewrites it and keeps its comments"
    if (old := of_version_1(source.data)) or has_tf32(source.data):
        place = source.value(("spec_version",) if old else ("train", "tf32"))
        message = "`train.tf32` is now `train.precision.tf32`"
        if old:
            message = f"the spec has version 1, but specc reads only version {VERSION}"
        raise SpecError((Diagnostic("S108", message, hint, place.file, place.mark),), source.texts)
