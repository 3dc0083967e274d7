"""The `inspect` command, which measures the weights of a run. It imports Torch only when it runs."""

import json
from pathlib import Path

import click

from specc.cli.options import (
    device_option,
    folder,
    json_option,
    number_option,
    run_argument,
    stated,
    tokenizers_option,
    with_data,
)
from specc.cli.output import Stages, say


@click.command("inspect")
@run_argument
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(["ranks", "heads", "units", "norms", "experts", "sensitivity"]),
    help="Measure only this part. Repeatable. By default, all parts.",
)
@number_option(
    "--bits",
    multiple=True,
    most=16,
    help="Bits at which the sensitivity is measured. Repeatable. By default, the schemes of the spec.",
)
@number_option(
    "--top",
    help="Number of largest singular values whose share of the energy is stated. By default, a tenth of all values.",
)
@number_option("--sequences", default=16, least=2, help="Number of rows of text for heads, units and norms.")
@number_option("--window", default=512, least=4, help="Number of tokens per row, at most the context.")
@number_option(
    "--max-tokens", default=65536, help="Number of tokens of the validation split on which the sensitivity is measured."
)
@click.option("--data", callback=stated, help="Data to measure on. By default, the data of the run.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="NAME=DATA",
    help="Name and data of one kind of documents. The load of experts is measured for each kind. Repeatable. "
    "By default, the data of the run.",
)
@click.option(
    "--picture", type=folder, metavar="DIR", help="Folder for the pictures, one PNG per part. Needs matplotlib."
)
@device_option
@tokenizers_option
@json_option
def command(
    run: Path,
    parts: tuple[str, ...],
    bits: tuple[int, ...],
    top: int | None,
    sequences: int,
    window: int,
    max_tokens: int,
    data: str | None,
    kinds: tuple[str, ...],
    picture: Path | None,
    target: str | None,
    tokenizers: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measure the final weights of a run: ranks, heads, units, norms, experts, sensitivity.

    Ranks are computed from the singular values of each matrix. Types of attention heads, dead units of MLPs and the
    growth of the residual stream are measured on the validation split. The load of each expert is measured on each kind
    of document. The sensitivity of a matrix is the increase in bits per byte if only this matrix is quantized. The
    output shows the measured increase, and the estimate of bit allocation.
    """
    from specc.runtime.inspection.inspect import PARTS, InspectOptions
    from specc.runtime.inspection.inspect import inspect as measure
    from specc.runtime.inspection.table import tables

    if picture is not None:
        from specc.runtime.inspection.pictures import draw, require

        require()
    chosen = tuple(part for part in PARTS if part in parts) if parts else PARTS
    if bits and "sensitivity" not in chosen:
        raise click.UsageError("--bits applies only to the sensitivity; add sensitivity to --only")
    by_kind = dict[str, str]()
    for text in kinds:
        name, _, place = text.partition("=")
        if not name or not place or name in by_kind:
            raise click.UsageError(f"--kind {text}: write NAME=DATA, with a different NAME for each kind")
        by_kind[name] = place
    if kinds and "experts" not in chosen:
        raise click.UsageError("--kind applies only to experts; add experts to --only")
    search = with_data(tokenizers, data)
    options = InspectOptions(chosen, bits, top, sequences, window, max_tokens, data, target, search, kinds=by_kind)
    result = measure(run, options, say, Stages())
    click.echo(json.dumps(result.facts(), indent=1, allow_nan=False) if as_json else "\n".join(tables(result)))
    if picture is not None:
        for path in draw(result, picture):
            say(f"wrote {path}")
