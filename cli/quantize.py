"""The `quantize` command, which quantizes a run."""

from pathlib import Path
from typing import Any

import click

from specc.cli.committed import require_built_run
from specc.cli.options import (
    device_option,
    json_option,
    number_option,
    run_argument,
    stated,
    tokenizers_option,
    with_data,
)
from specc.cli.output import Stages, say
from specc.cli.processes import end_with_parent
from specc.compiler.text.shell import shell_path


@click.command("quantize")
@run_argument
@click.option(
    "--data", callback=stated, help="Data for calibration and for the measured losses. By default, the data of the run."
)
@number_option(
    "--max-tokens", help="Number of tokens on which losses are measured. By default, the whole validation split."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="quant.PATH=VALUE",
    help="Override one quantization field of the run's spec. Repeatable.",
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["artifact", "submission"]),
    default="artifact",
    show_default=True,
    help="Files that quant.budget_bytes limits: the artifact, or a submission, which also contains train_gpt.py.",
)
@device_option
@tokenizers_option
@json_option
def command(
    run: Path, overrides: tuple[str, ...], purpose: str, tokenizers: tuple[Path, ...], as_json: bool, **settings: Any
) -> None:
    """Quantize the final weights of a run into an artifact, as its spec states."""
    from specc.runtime.quantize.pipeline import QuantizeOptions
    from specc.runtime.quantize.pipeline import quantize as run_quantize
    from specc.runtime.quantize.report import input_table, solution_line, table

    end_with_parent()
    require_built_run(run)
    places, code = with_data(tokenizers, settings["data"]), 0
    if purpose == "submission":
        from specc.runtime.submission.export import code_bytes

        code = code_bytes(run, overrides, places)
    options = QuantizeOptions(**settings, search=places, overrides=overrides, reserved=code)
    result = run_quantize(run, options, say, Stages())
    if as_json:
        click.echo((result.artifact.parent / "report.json").read_text(encoding="utf-8"), nl=False)
        return
    for name, score in (("before", result.before), ("after", result.after)):
        for line in score.report():
            click.echo(f"{name:<12} {line}")
    if result.calibration is not None:
        facts = ", ".join(f"{name} {value}" for name, value in result.calibration.items())
        click.echo(f"calibrated   {facts.replace('_', ' ')}, in {result.seconds:.1f} s")
    if line := solution_line(result.rows):
        click.echo(f"solved       {line}")
    click.echo(table(result.rows))
    if result.inputs:
        click.echo(input_table(result.inputs))
    click.echo(f"promoted     {', '.join(result.promoted) or 'nothing'}")
    budget = f" of {result.budget:,}" if result.budget is not None else ""
    beside = f" and {code:,} of code" if code else ""
    click.echo(f"artifact     {result.size.total:,} bytes{beside}{budget}: {result.artifact}")
    click.echo(f"report       {result.artifact.parent / 'report.json'}: the same figures, one row per parameter")
    wants = "--prompt TEXT" if result.spec.model.reads == "text" else "--lines FILE"
    click.echo(f"next: specc generate {shell_path(result.artifact)} {wants}")
