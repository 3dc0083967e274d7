"""The `export` command, which writes a run as a file or as a submission."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import rich_click as click

from specc.cli.options import folder, run_argument, tokenizers_option
from specc.cli.output import say


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `specc export`. `codec` and `targets` apply to a submission."""

    run: Path
    kind: Any
    out: Path | None
    force: bool
    codec: str | None
    targets: tuple[str, ...]
    tokenizers: tuple[Path, ...]


class Writer(Protocol):
    def __call__(self, options: ExportOptions) -> tuple[Sequence[Path], bool]:
        """Writes the files. Returns their paths, and whether they exceed a budget."""
        ...


def _one_file(options: ExportOptions) -> tuple[Sequence[Path], bool]:
    from specc.runtime.export.run import export as write

    if options.codec is not None or options.targets:
        raise click.UsageError("--codec and --target are for --format submission")
    return [write(options.run, options.kind, options.out, force=options.force, say=say)], False


def _submission(options: ExportOptions) -> tuple[Sequence[Path], bool]:
    from specc.runtime.artifact.codecs import Codec
    from specc.runtime.submission.export import export_submission
    from specc.runtime.submission.names import CODE, WEIGHTS

    size = export_submission(
        options.run,
        options.out or options.run / "submission",
        codec=Codec[(options.codec or "brotli").upper()],
        targets=options.targets,
        search=options.tokenizers,
        force=options.force,
        say=say,
    )
    return [size.path / CODE, size.path / WEIGHTS], size.over


WRITERS: Mapping[str, Writer] = {"artifact": _one_file, "safetensors": _one_file, "submission": _submission}


@click.command("export")
@run_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(WRITERS)),
    default="artifact",
    show_default=True,
    help="A submission is a folder: train_gpt.py, which does not need specc, and the weights.",
)
@click.option(
    "--out",
    type=folder,
    help="File to write, or folder for a submission. By default, it is in the folder of the run.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--codec",
    type=click.Choice(["brotli", "lzma"]),
    help="Compression of the weights of a submission. By default, brotli.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="Target whose code a submission contains. Repeatable. By default, all targets.",
)
@tokenizers_option
def command(
    run: Path,
    kind: Any,
    out: Path | None,
    force: bool,
    codec: str | None,
    targets: tuple[str, ...],
    tokenizers: tuple[Path, ...],
) -> int:
    """Export a run as an artifact, a safetensors file or a submission.

    Each file is read back and compared before the command succeeds. The exit code is 1 if a submission to
    parameter-golf exceeds its budget.
    """
    paths, over = WRITERS[kind](ExportOptions(run, kind, out, force, codec, targets, tokenizers))
    for path in paths:
        click.echo(f"wrote {path}: {path.stat().st_size:,} bytes")
    return int(over)
