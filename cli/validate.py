"""The `validate` command, which checks specs."""

from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling, SpecPath, format_option, set_option
from specc.cli.output import error_format, show


@click.command("validate", cls=Compiling)
@click.argument("specs", nargs=-1, required=True, type=SpecPath())
@set_option
@format_option
def command(specs: tuple[Path, ...], overrides: tuple[str, ...]) -> int:
    """Check specs and report all errors at once.

    A spec that passes can be built. The spec `-` is read from standard input.
    """
    from specc.compiler.build import plan_spec
    from specc.compiler.errors import SpeccError, SpecError
    from specc.compiler.text.source import name_of

    form = error_format()
    errors: list[SpeccError] = []
    for path in specs:
        try:
            plan_spec(path, overrides)
        except SpeccError as error:
            errors.append(error)
        else:
            if form == "text":
                click.echo(f"{name_of(path)}: ok")
    placed = [bad for bad in errors if isinstance(bad, SpecError)]
    for other in errors:
        if other not in placed:
            show(other, form)
    if placed:
        texts = {name: text for bad in placed for name, text in bad.texts.items()}
        show(SpecError([d for bad in placed for d in bad.diagnostics], texts), form)
    elif form == "json" and not errors:
        click.echo("[]")
    return 2 if errors else 0
