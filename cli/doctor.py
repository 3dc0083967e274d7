"""The `doctor` command, which checks the machine."""

import click

from specc.cli.options import json_option
from specc.cli.output import command_output, say


@click.command("doctor")
@click.option(
    "--torch", "import_torch", is_flag=True, help="Also import torch, which takes seconds, and list its GPUs."
)
@json_option
def command(import_torch: bool, as_json: bool) -> int:
    """Check the machine: packages, GPUs, compilers, caches, disk and threads.

    Each problem is shown with a fix. The exit code is 3 if a problem prevents a command from running. Software for GPUs
    is optional on a machine without a GPU.
    """
    from dataclasses import asdict

    from specc.compiler.errors import Diagnostic
    from specc.runtime.doctor import checks

    if import_torch:
        say("importing torch takes seconds ...")
    results = list(checks(import_torch))
    failed = [check for check in results if check.state == "failed"]
    if as_json:
        import json

        click.echo(json.dumps([asdict(check) for check in results], indent=2))
    else:
        words = {"ok": "ok", "note": "-", "failed": "FAILED"}
        for check in results:
            click.echo(f"{words[check.state]:<7} {check.name:<16} {check.detail}")
            if check.fix:
                click.echo(f"{'':<7} {'':<16} fix: {check.fix}")
    for check in failed:
        command_output().find(Diagnostic("E001", f"{check.name}: {check.detail}", check.fix))
    return 3 if failed else 0
