"""The `export` command, which writes a run as a file or as a submission."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import rich_click as click

from specc.cli.options import folder, run_argument, tokenizers_option
from specc.cli.output import say


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of `specc export`. `codec` and `targets` apply to a submission."""

    run: Path
    kind: Any
    out: Path | None
    force: bool
    codec: str | None
    targets: tuple[str, ...]
    tokenizers: tuple[Path, ...]


class Writer(Protocol):
    def __call__(self, wish: Wish) -> tuple[Sequence[Path], bool]:
        """Writes the files. Returns their paths, and whether they exceed a budget."""
        ...


def _one_file(wish: Wish) -> tuple[Sequence[Path], bool]:
    from specc.runtime.export.run import export as write

    if wish.codec is not None or wish.targets:
        raise click.UsageError("--codec and --target are for --format submission")
    return [write(wish.run, wish.kind, wish.out, force=wish.force, say=say)], False


def _submission(wish: Wish) -> tuple[Sequence[Path], bool]:
    from specc.runtime.artifact.codecs import Codec
    from specc.runtime.submission.export import export_submission
    from specc.runtime.submission.names import CODE, WEIGHTS

    size = export_submission(
        wish.run,
        wish.out or wish.run / "submission",
        codec=Codec[(wish.codec or "brotli").upper()],
        targets=wish.targets,
        search=wish.tokenizers,
        force=wish.force,
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
    help="A submission is a folder: train_gpt.py, which needs no specc, and the weights.",
)
@click.option("--out", type=folder, help="The file, or of a submission the folder, to write; in the run where unset.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--codec", type=click.Choice(["brotli", "lzma"]), help="Of a submission's weights; brotli where unset.")
@click.option("--target", "targets", multiple=True, help="Of a submission, take the code of this one only; repeatable.")
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
    """Write a run as one file, read back and compared before it counts; or as a submission.

    The exit code is 1 if a submission to parameter-golf exceeds its budget.
    """
    paths, over = WRITERS[kind](Wish(run, kind, out, force, codec, targets, tokenizers))
    for path in paths:
        click.echo(f"wrote {path}: {path.stat().st_size:,} bytes")
    return int(over)
