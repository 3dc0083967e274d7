"""Runs whose models are exported as graphs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_samples import SPEC, make_run, small_spec, write_text

from specc.runtime.export.format import ExportRequest
from specc.runtime.export.formats import format_of
from specc.runtime.log import Say
from specc.runtime.storage.run_directory import Run


@dataclass(frozen=True)
class Sample:
    """A committed spec in a smaller size."""

    spec: Path
    overrides: tuple[str, ...]


LINES = Sample(
    SPEC.with_name("poly_transformer.yaml"),
    (
        "model.encoder.0.dim=32",
        "model.decoder.0.dim=32",
        *(f"model.{side}.1.{key}" for side in ("encoder", "decoder") for key in ("count=1", "layers.0.heads=2")),
        "model.encoder.1.layers.1.hidden=48",
        "model.decoder.1.layers.1.heads=2",
        "model.decoder.1.layers.2.hidden=48",
    ),
)


def text_run(folder: Path, data: Path) -> Run:
    return make_run(folder, small_spec(), str(write_text(data)))


def export(
    run: Run, format: str, out: Path | None = None, force: bool = False, say: Say = lambda _: None, **options: Any
) -> tuple[Path, ...]:
    """The files of a format."""
    return format_of(format).write(ExportRequest(run.directory, out, force, (), say, options)).paths
