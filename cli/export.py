"""The `export` command, which writes a run as an artifact, as a submission, or in a format for other programs."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specc.cli.committed import require_built_run
from specc.cli.options import folder, number_option, run_argument, tokenizers_option
from specc.cli.output import find_over_budget, say
from specc.runtime.export.formats import format_names, format_of, formats_with


@click.command("export")
@run_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(format_names()),
    default="artifact",
    show_default=True,
    help="hf is a folder that `from_pretrained` of Transformers loads. onnx and pt2 are one program of the model as a "
    "graph, for onnxruntime and `torch.export.load`. submission is a folder that contains the weights and "
    "train_gpt.py, which does not need specc.",
)
@click.option(
    "--out",
    type=folder,
    help="File to write, or folder for hf and submission. By default, it is in the folder of the run.",
)
@click.option("--force", is_flag=True, help="Replace an existing file or folder.")
@click.option(
    "--program",
    type=click.Choice(["logits", "score"]),
    default="logits",
    show_default=True,
    help="Program to export as onnx or pt2: the logits of each token, or the loss of each target in nats.",
)
@click.option(
    "--quantized",
    is_flag=True,
    help="For onnx and pt2: export the dequantized weights of the artifact instead of the trained weights.",
)
@click.option(
    "--dtype",
    type=click.Choice(["f32", "bf16", "f16"]),
    help="Dtype of the weights of hf. By default, the dtypes of the imported weights, or f32 without imported weights.",
)
@number_option("--shard-bytes", default=5_000_000_000, help="Maximum size of a weight file of hf.")
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
@click.pass_context
def command(
    context: click.Context,
    /,
    run: Path,
    kind: str,
    out: Path | None,
    force: bool,
    tokenizers: tuple[Path, ...],
    **settings: Any,
) -> int:
    """Export a run as an artifact, safetensors, a graph, a folder of Transformers or a submission.

    Each written file is read back and compared before the command succeeds. The exit code is 1 if a submission to
    parameter-golf exceeds its budget.
    """
    from specc.runtime.export.format import ExportRequest

    given = [name for name in settings if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    format = format_of(kind)
    for name in given:
        if name not in format.options:
            option = next(parameter for parameter in context.command.params if parameter.name == name)
            raise click.UsageError(f"{option.opts[0]} is for --format {' or '.join(formats_with(name))}")
    require_built_run(run)
    options = {name: settings[name] for name in given}
    exported = format.write(ExportRequest(run, out, force, tokenizers, say, options))
    for path in exported.paths:
        click.echo(f"wrote {path}: {path.stat().st_size:,} bytes")
    return int(find_over_budget(exported.paths[0].parent, exported.total, exported.budget))
