"""Where a run has what `specc quantize` made of it, and whether that is of its newest weights."""

import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.storage import committed
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.run_directory import Run, RunDirectoryError

ARTIFACT = "model.specc"
REPORT = "report.json"


def quantized_artifact(run: Run, say: Callable[[str], None]) -> Path:
    """Where the run's quantized model is; `say` is told where the run has other weights since. Raises RunFailure when
    it was not quantized."""
    with suppress(OSError):  # in a folder that can only be read there is nothing to finish
        committed.settle(run.quantized, run.staged)
    path = run.quantized / ARTIFACT
    again = f"specc quantize {shlex.quote(str(run.directory))}"
    if not path.is_file():
        raise RunFailure(f"{run.directory} is not quantized", f"first: {again}")
    try:
        step = json.loads(Committed.open(run.quantized).read(REPORT))["step"]
    except IntegrityError as error:
        say(f"{error.message}: of which step the artifact is, is not known")
        return path
    from specc.runtime.storage import checkpoint  # with torch: not for the bytes of an artifact alone

    newest = checkpoint.latest(run.checkpoints, say)
    if newest is not None and checkpoint.read_state(newest).step > step:
        say(f"the artifact is of step {step}, and {newest} is newer; one of that: {again}")
    return path


def artifact_of(path: Path, say: Callable[[str], None]) -> Path:
    """The artifact that `path` is, or that of the run that it is, as `quantized_artifact`. Raises RunDirectoryError
    when there is neither, otherwise as that and `Run.open`."""
    if path.is_dir():
        return quantized_artifact(Run.open(path), say)
    if not path.exists():
        raise RunDirectoryError(f"{path}: no such run or artifact", "name a run directory or a .specc file")
    return path
