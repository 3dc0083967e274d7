"""The `explain` command, which shows the reason for the kernel of each node."""

import shlex
from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling, checked_targets, format_option, json_option, spec_argument, target_option


@click.command("explain", cls=Compiling)
@spec_argument
@click.argument("node", required=False)
@target_option
@json_option
@format_option
def command(spec: Path, node: str | None, target: str | None, as_json: bool) -> None:
    """Show the kernel of each node, and why each other kernel was not chosen.

    NODE limits the output to one node.
    """
    from specc.compiler.build import DEPLOYED, plan_spec
    from specc.compiler.report.explain import explain as explained
    from specc.compiler.report.explain import text_of

    planned = plan_spec(spec, (), checked_targets(spec, target))
    plans = {**planned.plans, **{f"{name}/{DEPLOYED}": plan for name, plan in planned.deployed.items()}}
    rows = [row for folder, plan in plans.items() for row in explained(plan, node, folder)]
    if not rows and node is not None:
        message = f"no node of {planned.spec.name} is named {node}; `specc ir {shlex.quote(str(spec))}` lists them"
        raise click.UsageError(message)
    if as_json:
        import json

        click.echo(json.dumps([row.data() for row in rows], indent=2))
    else:
        texts = [text_of(row) for row in rows]
        if node is None and (bare := [folder for folder, plan in plans.items() if not plan.choices]):
            name = planned.spec.name
            texts.append(f"{name} has no generated kernels on {', '.join(bare)}: Torch computes all nodes")
        click.echo("\n\n".join(texts))
