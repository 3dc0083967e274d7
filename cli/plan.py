"""The `plan` command, which summarizes the build of a spec."""

from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling, SpecPath, format_option, json_option, set_option
from specc.cli.output import tell


@click.command("plan", cls=Compiling)
@click.argument("spec", type=SpecPath())
@set_option
@json_option
@format_option
def command(spec: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Summarize a spec: parameters, bytes, FLOPs, kernels and times.

    The spec `-` is read from standard input.
    """
    from specc.compiler.build import plan_spec
    from specc.compiler.report.summary import Summary, data, lines

    planned = plan_spec(spec, overrides)
    summary = Summary(planned.spec, planned.plans, planned.deployed)
    if as_json:
        import json

        click.echo(json.dumps({**data(summary), "idle_lock_entries": list(planned.lock_use.idle)}, indent=2))
    else:
        tell(planned.lock_use.note(spec))
        click.echo("\n".join(lines(summary)))
