"""Exports a run as one file: its quantized artifact, or its unquantized weights."""

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
    """Raised if the output file exists, its path is not usable, or the run cannot be exported in this form."""

    code = "U012"
    exit_code = 2


def export(path: Path, format: Format, out: Path | None = None, *, force: bool = False, say: Say | None = None) -> Path:
    """Exports the run at `path` as one file and returns its path.

    The file is read back and compared before it is renamed to `out`.

    Args:
        path: the run directory.
        format: "artifact" copies the artifact that `specc quantize` wrote. "safetensors" writes the final weights of
            the run, f32, with the spec's name and digest and the step as metadata.
        out: the output file; NAME.specc or NAME.safetensors in the run directory if None.
        force: overwrite `out` if it exists.
        say: called with a line of text if the artifact is older than the weights of the run.

    Returns:
        The path of the output file.

    Raises:
        ExportError (exit code 2): `out` exists and `force` is False, `out` is a folder, or its folder does not exist.
        RunDirectoryError (2): `path` is not a run.
        EnvironmentFailure (3): the file cannot be written.
        RunFailure (4): the run is not quantized or has no checkpoint.
        IntegrityError (5): the source is damaged, or the data read back differ.
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
            raise IntegrityError(f"{out}: the data read back differ from what was written", "check disk and memory")

    write_atomically(out, [data], check)
