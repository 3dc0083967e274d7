"""The command that summarizes what a spec makes."""

from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling, format_option, json_option, set_option, spec_argument
from specc.cli.output import tell


@click.command("plan", cls=Compiling)
@spec_argument
@set_option
@json_option
@format_option
def command(spec: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Summarize what a spec makes: parameters, bytes, FLOPs, kernels."""
    from specc.compiler.build import plan_spec
    from specc.compiler.report.page import summary, summary_data

    planned = plan_spec(spec, overrides)
    if as_json:
        import json

        data = summary_data(planned.spec, planned.plans, planned.deployed)
        data = {**data, "idle_lock_entries": list(planned.lock_use.idle)}
        click.echo(json.dumps(data, indent=2))
    else:
        tell(planned.lock_use.note(spec))
        click.echo("\n".join(summary(planned.spec, planned.plans, planned.deployed)))
