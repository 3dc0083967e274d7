"""The `export` command, which writes a run as a file or as a submission."""

from pathlib import Path
from typing import Any

import rich_click as click

from specc.cli.committed import require_built_run
from specc.cli.options import folder, run_argument, tokenizers_option
from specc.cli.output import find_over_budget, say


@click.command("export")
@run_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(["artifact", "safetensors", "hf", "submission"]),
    default="artifact",
    show_default=True,
    help="hf is a folder that `from_pretrained` of Transformers loads. A submission is a folder: train_gpt.py, which "
    "does not need specc, and the weights.",
)
@click.option(
    "--out",
    type=folder,
    help="File to write, or folder for hf and submission. By default, it is in the folder of the run.",
)
@click.option("--force", is_flag=True, help="Replace an existing file or folder.")
@click.option(
    "--dtype",
    type=click.Choice(["f32", "bf16", "f16"]),
    help="Dtype of the weights of hf. By default, those of the imported weights, or f32.",
)
@click.option(
    "--shard-bytes",
    type=click.IntRange(min=1),
    default=5_000_000_000,
    show_default=True,
    help="Largest file of weights of hf.",
)
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
    dtype: str | None,
    shard_bytes: int,
    codec: str | None,
    targets: tuple[str, ...],
    tokenizers: tuple[Path, ...],
) -> int:
    """Export a run as an artifact, safetensors, a folder of Transformers or a submission.

    Each file is read back and compared before the command succeeds. The exit code is 1 if a submission to
    parameter-golf exceeds its budget.
    """
    over = False
    if dtype is not None and kind != "hf":
        raise click.UsageError("--dtype is for --format hf")
    if (codec is not None or targets) and kind != "submission":
        raise click.UsageError("--codec and --target are for --format submission")
    require_built_run(run)
    if kind == "submission":
        from specc.runtime.artifact.codecs import Codec
        from specc.runtime.submission.export import export_submission
        from specc.runtime.submission.names import CODE, WEIGHTS

        size = export_submission(
            run,
            out or run / "submission",
            codec=Codec[(codec or "brotli").upper()],
            targets=targets,
            search=tokenizers,
            force=force,
            say=say,
        )
        paths = [size.path / CODE, size.path / WEIGHTS]
        over = find_over_budget(size.path, size.total, size.budget)
    elif kind == "hf":
        from specc.runtime.hugging_face.exporting import ExportOptions, export_folder

        written = export_folder(run, ExportOptions(out, dtype, shard_bytes, tokenizers, force), say)
        paths = sorted(written.iterdir())
    else:
        from specc.runtime.export.run import export

        paths = [export(run, kind, out, force=force, say=say)]
    for path in paths:
        click.echo(f"wrote {path}: {path.stat().st_size:,} bytes")
    return int(over)
