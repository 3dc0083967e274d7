"""The command that compares two specs."""

from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling, format_option


@click.command("diff", cls=Compiling)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@format_option
def command(before: Path, after: Path) -> int:
    """Compare two specs: a summary, then the specs, the plans and the kernels, paired by node."""
    from specc.compiler.diff import compare as compared

    summary, text = compared(before, after)
    click.echo("\n".join(summary))
    if text:
        click.echo(f"\n{text}", nl=False)
    return 1 if text else 0
