"""The `verify` command, which checks generated code against its plan. It imports Torch only when it runs."""

import json
from itertools import chain
from pathlib import Path

import click

from specc.cli.options import checked_targets, json_option, spec_argument, target_option
from specc.cli.output import command_output


@click.command("verify")
@spec_argument
@target_option
@json_option
def command(spec: Path, target: str | None, as_json: bool) -> int:
    """Compare generated code with its plan and with float64 references.

    The command checks that a trace of the code by torch.fx equals the plan. It also checks causality, and the int8
    programs for artifacts. For a model with more than 200 million parameters, values are checked on a smaller model.
    The smaller model has one layer per distinct block, but at least two layers, and at most 1,024 token ids.

    The exit code is 1 if a check fails, and 3 if this machine cannot run the target of --target.
    """
    from specc.compiler.build import plan_spec
    from specc.compiler.errors import Diagnostic

    selected = checked_targets(spec, target)
    planned = plan_spec(spec, (), selected)
    from specc.runtime.verify.deployed import verify_deployed
    from specc.runtime.verify.verify import verify as checks

    results = []
    words = {True: "ok", False: "FAILED", None: "not here"}
    targets = selected or planned.spec.targets
    for check in chain(checks(planned.spec, targets, lock=planned.lock), verify_deployed(planned.spec, targets)):
        results.append(check)
        if not as_json:
            click.echo(f"{check.target:<6} {words[check.ok]:<8} {check.name}: {check.detail}")
        if check.ok is False:
            finding = Diagnostic("F006", f"{check.target}: {check.name}: {check.detail}", "", str(spec))
            command_output().find(finding)
    if as_json:
        rows = [{"target": c.target, "name": c.name, "ok": c.ok, "detail": c.detail} for c in results]
        click.echo(json.dumps(rows, indent=2))
    if any(check.ok is False for check in results):
        return 1
    return 3 if target is not None and any(check.ok is None for check in results) else 0
