"""Exports a run as one file: the artifact that it was quantized to, or its weights in full."""

from pathlib import Path
from typing import Literal

from specc.runtime.errors import IntegrityError, RuntimeFailure
from specc.runtime.export.safetensors import export_safetensors
from specc.runtime.open_model import Say, final_weights, read_verified
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.quantized_run import quantized_artifact
from specc.runtime.storage.run_directory import Run

Format = Literal["artifact", "safetensors"]
SUFFIXES: dict[Format, str] = {"artifact": ".specc", "safetensors": ".safetensors"}


class ExportError(RuntimeFailure):
    """The export would destroy a file, or its name leads nowhere."""

    exit_code = 2


def export(path: Path, format: Format, out: Path | None = None, *, force: bool = False, say: Say | None = None) -> Path:
    """Writes the run at `path` as one file, `out`, and returns where; unless it is given, into the run as
    NAME.specc or NAME.safetensors.

    `artifact` is a copy of what `specc quantize` made; `safetensors` the weights that the run ends with, f32,
    with the spec's name and digest and the step in the metadata. Both are read back and compared before they
    take their place. `say` is told of an artifact that is older than the run's weights.

    Raises ExportError (2) for an `out` that exists, unless `force`, or has no folder; RunDirectoryError (2)
    without a run; RunFailure (4) where it was not quantized, has no checkpoint, or nothing can be written;
    IntegrityError (5) for damage, before or after.
    """
    run = Run.open(path)
    out = out if out is not None else run.directory / f"{run.spec.name}{SUFFIXES[format]}"
    if out.is_dir() or not out.parent.is_dir():
        raise ExportError(f"{out} is not a place for a file", "name a file in a folder that exists")
    if out.exists() and not force:
        raise ExportError(f"{out} exists", "name another file with --out, or replace it with --force")
    say = say or (lambda _: None)
    if format == "artifact":
        _copy_artifact(run, out, say)
    else:
        weights, step = final_weights(run, say)
        about = {"name": run.spec.name, "spec_digest": run.spec_digest, "step": str(step)}
        export_safetensors(out, weights, {"format": "pt", **about})
    return out


def _copy_artifact(run: Run, out: Path, say: Say) -> None:
    source = quantized_artifact(run, say)
    data = source.read_bytes()
    read_verified(source)

    def check(temporary: Path) -> None:
        read_verified(temporary)
        if temporary.read_bytes() != data:
            raise IntegrityError(f"{out}: what was written does not read back", "check disk and memory")

    write_atomically(out, [data], check)
