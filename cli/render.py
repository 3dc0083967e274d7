"""The `render` command, which prints a resolved spec."""

from pathlib import Path

import click

from specc.cli.options import Compiling, SpecPath, set_option


@click.command("render", cls=Compiling)
@click.argument("spec", type=SpecPath())
@set_option
def command(spec: Path, overrides: tuple[str, ...]) -> None:
    """Print a spec with every value that applies, and the origin of each.

    A comment on each line states the origin of the value: a file and line, `default`, or an override. The output is a
    spec with the same meaning as SPEC. The spec `-` is read from standard input.
    """
    from specc.compiler.spec.check import load
    from specc.compiler.spec.resolved import resolved_text

    loaded, source = load(spec, overrides)
    click.echo(resolved_text(loaded, source, overrides), nl=False)
