"""The `report` command, which writes the page of a run. It imports Torch only when it runs."""

from pathlib import Path

import click
from click import get_current_context
from click.core import ParameterSource

from specc.cli.options import device_option, folder, number_option, run_argument, tokenizers_option
from specc.cli.output import say

OF_SAMPLES = ("prompts", "seed", "max_tokens", "temperature")


@click.command("report")
@run_argument
@click.option("--out", type=folder, help="File to write. By default, report.html, or README.md, in the run.")
@click.option("--force", is_flag=True, help="Replace an existing file that --out names.")
@click.option(
    "--card", is_flag=True, help="Write a model card for the Hugging Face hub, in Markdown, instead of the page."
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Start of a sample, or a line to transform. Repeatable. By default, two texts without a prompt, or lines of "
    "the validation split.",
)
@number_option("--seed", default=0, least=0, most=2**63 - 2, help="Seed of the samples.")
@number_option("--max-tokens", default=200, help="Maximum tokens of a sample.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="Temperature of the samples.")
@click.option(
    "--no-samples", is_flag=True, help="Generate no samples. Samples that the run already stores are still shown."
)
@device_option
@tokenizers_option
def command(
    run: Path,
    out: Path | None,
    force: bool,
    card: bool,
    prompts: tuple[str, ...],
    seed: int,
    max_tokens: int,
    temperature: float,
    no_samples: bool,
    target: str | None,
    tokenizers: tuple[Path, ...],
) -> None:
    """Write a report of a run: a self-contained HTML page, or a model card.

    The page shows the model, the training curves, the validation scores, the error of each quantized parameter, the
    load of experts, and samples. The command reads only the files of the run. Samples are generated once and stored in
    the run.
    """
    from specc.runtime.report.sampling import SampleOptions
    from specc.runtime.report.write import write_card, write_report

    origin = get_current_context().get_parameter_source
    stated = [name for name in OF_SAMPLES if origin(name) is not ParameterSource.DEFAULT]
    if stated and (card or no_samples):
        beside, option = "--card" if card else "--no-samples", stated[0].removesuffix("s").replace("_", "-")
        option = "max-tokens" if stated[0] == "max_tokens" else option
        raise click.UsageError(f"--{option} has no effect together with {beside}")
    if card:
        path = write_card(run, out, force)
    else:
        options = SampleOptions(prompts, seed, max_tokens, temperature, target, tokenizers)
        path = write_report(run, out, None if no_samples else options, bool(stated), say, force)
    click.echo(f"wrote {path}: {path.stat().st_size:,} bytes")
