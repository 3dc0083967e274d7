"""The `diff` command, which compares two specs."""

from pathlib import Path

import click

from specc.cli.options import Compiling, SpecPath
from specc.cli.output import FORMATS, command_output


@click.command("diff", cls=Compiling)
@click.argument("before", type=SpecPath())
@click.argument("after", type=SpecPath())
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
    specs differ. One of the specs may be `-` for standard input.
    """
    from specc.compiler.compare.diff import Comparison
    from specc.compiler.errors import Diagnostic
    from specc.compiler.text.source import STDIN, name_of

    if before == after == STDIN:
        raise click.UsageError("only one of the specs can be read from standard input")
    comparison = Comparison.of(before, after)
    click.echo(comparison.markdown() if form == "markdown" else comparison.text(), nl=form != "markdown")
    if not comparison.equal:
        command_output().find(Diagnostic("F004", f"{name_of(before)} and {name_of(after)} differ", "", name_of(after)))
    return 0 if comparison.equal else 1
