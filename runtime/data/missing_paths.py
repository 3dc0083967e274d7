"""Builds errors for paths that do not exist, with suggestions of similar paths."""

import os
from difflib import get_close_matches
from glob import has_magic
from pathlib import Path

from specc.compiler.spec.data.kind import DataKind
from specc.compiler.spec.data.lines import file_settings
from specc.runtime.data.errors import DataError

SHOWN = 3  # maximum number of suggestions in a hint
SOURCES = "name a text file, a jsonl file, a token shard, a folder of such files, or `stdlib`"


def nearest_paths(path: Path) -> str:
    """Returns a hint for a missing path, such as `did you mean runs/text.txt?`.

    If the parent folder is also missing, the hint names the parent folder. Without a similar path, the hint is empty.
    """
    parent = path.parent
    if os.path.lexists(path):  # for example a folder in place of a file, or a symbolic link to nothing
        return ""
    if not parent.is_dir():
        existing = next((folder for folder in parent.parents if folder.is_dir()), parent)
        missing = parent.relative_to(existing).parts[0] if parent.is_relative_to(existing) else parent.name
        return f"there is no {existing / missing}"
    try:
        names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    except OSError:
        return ""
    lower = {name.lower(): name for name in reversed(names)}
    close = [lower[name] for name in get_close_matches(path.name.lower(), list(lower), SHOWN, 0.6)]
    close += [name for name in names if Path(name).stem == path.name and name not in close]
    return f"did you mean {' or '.join(str(parent / name) for name in close[:SHOWN])}?" if close else ""


def data_hint(kind: DataKind) -> str:
    """Returns a description of the values that the option `--data` accepts for a kind of data."""
    if kind.gives == "text":
        return SOURCES
    form = f"--data must be a file of lines `{file_settings(kind).form}`"
    return f"{form}, or `{kind.usual}`" if kind.usual else form


def missing_source(path: Path, sources: str = SOURCES) -> DataError:
    """Returns the error for a source that does not exist. `sources` describes the valid sources."""
    near, missing = nearest_paths(path), "broken symbolic link" if path.is_symlink() else "no such file or folder"
    return DataError(f"{path}: {missing}", "; ".join(filter(None, (near, sources))))


def require_source(source: str, kind: DataKind) -> None:
    """Raises DataError if a source of data of this kind does not exist. A pattern of shards is not checked.

    The check does not import Torch, so that a command can fail before slow imports.
    """
    if not source:
        raise DataError(f"data of kind `{kind.kind}` have no default", "name the data with --data")
    path = Path(source).expanduser()
    if source != kind.usual and not has_magic(source) and not path.exists():
        raise missing_source(path, data_hint(kind))
