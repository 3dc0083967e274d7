"""Finds the quantized artifact of a run. Warns if the run has newer weights than the artifact."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from specc.compiler.text.shell import shell_path
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.storage import committed
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.run_directory import Run, require_path

ARTIFACT = "model.specc"
REPORT = "report.json"


def quantized_artifact(run: Run, say: Callable[[str], None]) -> Path:
    """Returns the path of the artifact of a run.

    The function calls `say` with a warning if the run has newer weights than the artifact, or if the step of the
    artifact is unknown. Raises RunFailure if the run is not quantized.
    """
    with suppress(OSError):  # in a read-only folder, an interrupted replacement cannot be finished
        committed.settle(run.quantized, run.staged)
    path = run.quantized / ARTIFACT
    again = f"specc quantize {shell_path(run.directory)}"
    if not path.is_file():
        raise RunFailure(f"{run.directory} is not quantized", f"first: {again}")
    try:
        step = json.loads(Committed.open(run.quantized).read(REPORT))["step"]
    except IntegrityError as error:
        say(f"{error.message}: the step of the artifact is unknown")
        return path
    from specc.runtime.storage import (
        checkpoint,
    )  # imported here, because the imported module imports torch, which other readers of an artifact do not need

    newest = checkpoint.latest(run.checkpoints, say)
    if newest is not None and checkpoint.read_state(newest).step > step:
        say(f"the artifact has the weights of step {step}, but {newest} is newer; to quantize it: {again}")
    return path


def is_quantized(folder: Path) -> bool:
    """Returns whether the folder `quantized/` of a run has files. A run is created with an empty folder."""
    return folder.is_dir() and any(folder.iterdir())


def quantized_report(folder: Path) -> dict[str, Any] | None:
    """Returns the content of the report in the folder `quantized/` of a run; None if the run is not quantized. Raises
    IntegrityError if the folder is damaged.
    """
    if not is_quantized(folder):
        return None
    report: dict[str, Any] = json.loads(Committed.open(folder).read(REPORT))
    return report


def artifact_of(path: Path, say: Callable[[str], None]) -> Path:
    """Returns `path` if it is an artifact. If `path` is a run directory, returns the artifact of the run.

    The function calls `say` with a warning if the run has newer weights than the artifact. Raises RunDirectoryError if
    `path` does not exist, is a spec, or is a folder but not a run. Raises RunFailure if the run is not quantized.
    Raises IntegrityError if the run is damaged.
    """
    if path.is_dir():
        return quantized_artifact(Run.open(path), say)
    require_path(path)
    return path
