"""The `size` command, which counts the bytes of an artifact or a submission."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from specc.cli.options import Compiling, json_option, model_argument, number_option
from specc.cli.output import find_over_budget, say


@click.command("size", cls=Compiling)
@model_argument
@number_option("--budget", help="Budget in bytes. By default, the budget of the spec.")
@click.option(
    "--plain",
    is_flag=True,
    help="Also compress the same arrays as parameter-golf PR 1105 does, and compare the sizes. Takes minutes.",
)
@click.option(
    "--layers", is_flag=True, help="Show one row per parameter of each layer instead of one row for all layers."
)
@json_option
def command(model: Path, budget: int | None, plain: bool, layers: bool, as_json: bool) -> int:
    """Count the bytes of an artifact or a submission exactly.

    The exit code is 1 if the size exceeds the budget. The size of a submission is the size of its code file plus the
    size of its weights file.
    """
    from specc.runtime.submission.count import is_submission, submission_size

    more: dict[str, object] = {}
    if plain:
        from specc.runtime.submission.plain import plain_size

        compared = plain_size(model)
        more = {"artifact": compared.artifact, "plain": compared.plain}
        if not as_json:
            click.echo(compared.report())
    if is_submission(model):
        if layers:
            raise click.UsageError(f"--layers is for an artifact or a run; {model} is a submission")
        counted = submission_size(model, budget)
        for line in [json.dumps({**counted.facts(), **more}, indent=2)] if as_json else counted.report():
            click.echo(line)
        return int(find_over_budget(model, counted.total, counted.budget))
    from specc.runtime.export.size import size as count
    from specc.runtime.storage.evaluations import evaluation_line, recorded_evaluations

    sizes = count(model, budget, say, layers)
    evaluations = recorded_evaluations(model if model.is_dir() else model.absolute().parent.parent, say)
    if as_json:
        facts = {"path": str(sizes.path), "total": sizes.total, "budget": sizes.budget, "over": sizes.over}
        scores = {"evaluations": evaluations} if evaluations else {}
        groups = [asdict(group) for group in sizes.groups]
        click.echo(json.dumps({**facts, "groups": groups, **more, **scores}, indent=2))
        return int(find_over_budget(sizes.path, sizes.total, sizes.budget))
    width = max(28, *(len(group.name) for group in sizes.groups))
    for group in sizes.groups:
        click.echo(
            f"{group.name:<{width}} {group.tensors:>4} x {group.scheme:<22} {group.stored:>12,} bytes before brotli"
        )
    for section in sizes.sections:
        click.echo(f"section {section.kind:<20} {section.compressed:>12,} bytes of {section.raw:,}")
    against = (
        f" of {sizes.budget:,}: {'OVER by' if sizes.over else 'within, by'} {abs(sizes.budget - sizes.total):,}"
        if sizes.budget
        else ""
    )
    for evaluation in evaluations:
        click.echo(evaluation_line(evaluation))
    click.echo(f"{sizes.path}: {sizes.total:,} bytes{against}")
    return int(find_over_budget(sizes.path, sizes.total, sizes.budget))
