"""The `diff` command, which compares two specs."""

from pathlib import Path

import click

from specc.cli.options import Compiling
from specc.cli.output import FORMATS, command_output


@click.command("diff", cls=Compiling)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice((*FORMATS, "markdown")),
    default=FORMATS[0],
    help="Format of errors and findings. With `markdown`, the output is a comment for a pull request.",
)
def command(before: Path, after: Path, form: str) -> int:
    """Compare two specs and the code that is generated from them.

    A summary comes first. The changes of the spec, of model.py and of the kernels follow. The exit code is 1 if the
    specs differ.
    """
    from specc.compiler.compare.diff import Comparison
    from specc.compiler.errors import Diagnostic

    comparison = Comparison.of(before, after)
    click.echo(comparison.markdown() if form == "markdown" else comparison.text(), nl=form != "markdown")
    if not comparison.equal:
        command_output().find(Diagnostic("F004", f"{before} and {after} differ", "", str(after)))
    return 0 if comparison.equal else 1
