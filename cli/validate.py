"""The `validate` command, which checks specs."""

from pathlib import Path

import click

from specc.cli.options import Compiling, SpecPath, set_option
from specc.cli.output import command_output


@click.command("validate", cls=Compiling)
@click.argument("specs", nargs=-1, required=True, type=SpecPath())
@set_option
def command(specs: tuple[Path, ...], overrides: tuple[str, ...]) -> int:
    """Check specs and report all errors at once.

    A spec that passes can be built. The spec `-` is read from standard input.
    """
    from specc.compiler.build import plan_spec
    from specc.compiler.errors import SpeccError, SpecError
    from specc.compiler.text.source import name_of

    output = command_output()
    errors: list[SpeccError] = []
    for path in specs:
        try:
            plan_spec(path, overrides)
        except SpeccError as error:
            errors.append(error)
        else:
            click.echo(f"{name_of(path)}: ok", err=output.form == "github")
    placed = [bad for bad in errors if isinstance(bad, SpecError)]
    for other in errors:
        if other not in placed:
            output.fail(other)
    if placed:
        texts = {name: text for bad in placed for name, text in bad.texts.items()}
        output.fail(SpecError([d for bad in placed for d in bad.diagnostics], texts))
    return 2 if errors else 0
