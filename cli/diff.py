"""The `diff` command, which compares two specs."""

from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling
from specc.cli.output import FORMATS


@click.command("diff", cls=Compiling)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice((*FORMATS, "markdown")),
    default=FORMATS[0],
    help="How errors are shown; `markdown` is a comment for a pull request.",
)
def command(before: Path, after: Path, form: str) -> int:
    """Compare two specs: a summary, then the specs, model.py and the kernels, paired by node."""
    from specc.compiler.diff import Comparison

    comparison = Comparison.of(before, after)
    click.echo(comparison.markdown() if form == "markdown" else comparison.text(), nl=form != "markdown")
    return 0 if comparison.equal else 1
