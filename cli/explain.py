"""The `explain` command, which explains error codes and the kernels of nodes."""

from pathlib import Path

import click

from specc.cli.options import Compiling, checked_targets, json_option, set_option, target_option
from specc.compiler.text.shell import shell_path


@click.command("explain", cls=Compiling)
@click.argument("subject", metavar="[CODE|SPEC]", required=False)
@click.argument("node", required=False)
@set_option
@target_option
@json_option
def command(
    subject: str | None, node: str | None, overrides: tuple[str, ...], target: str | None, as_json: bool
) -> None:
    """Explain an error code, or the kernel of each node of a spec.

    For a CODE such as S104, the command shows its meaning, its exit code, a bad example and a good example. Without an
    argument, it lists all codes.

    For a SPEC, it shows the kernel of each node, and the reason why each other kernel was not chosen. With NODE, it
    shows only this node.
    """
    from specc.compiler.report.error_pages import CODE

    if subject is not None and (CODE.fullmatch(subject) is None or Path(subject).exists()):
        _explain_nodes(Path(subject), node, overrides, target, as_json)
    elif node is not None or target is not None or overrides:
        raise click.UsageError("NODE, --set and --target apply only to a spec")
    else:
        _explain_codes(subject, as_json)


def _explain_codes(code: str | None, as_json: bool) -> None:
    from dataclasses import asdict

    from specc.compiler.errors.codes import CODES
    from specc.compiler.report.error_pages import page_of

    pages = [page_of(code.upper())] if code is not None else []
    if as_json:
        import json

        codes = [{"code": key, "meaning": meaning} for key, meaning in CODES.items()]
        click.echo(json.dumps([asdict(page) for page in pages] or codes, indent=2))
    else:
        texts = [page.text() for page in pages] or [f"{key}  {meaning}" for key, meaning in CODES.items()]
        click.echo("\n".join(texts))


def _explain_nodes(spec: Path, node: str | None, overrides: tuple[str, ...], target: str | None, as_json: bool) -> None:
    from specc.compiler.build import DECODING, DEPLOYED, decoding_plans, plan_spec
    from specc.compiler.report.explain import explain as explained
    from specc.compiler.report.explain import text_of

    planned = plan_spec(spec, overrides, checked_targets(spec, target))
    plans = {**planned.plans, **{f"{name}/{DEPLOYED}": plan for name, plan in planned.deployed.items()}}
    if node is not None:
        plans |= {f"{name}/{DECODING}": plan for name, plan in decoding_plans(planned).items()}
    rows = [row for folder, plan in plans.items() for row in explained(plan, node, folder)]
    if not rows and node is not None:
        message = f"no node of {planned.spec.name} is named {node}; `specc ir {shell_path(spec)}` lists them"
        raise click.UsageError(message)
    if as_json:
        import json

        click.echo(json.dumps([row.data() for row in rows], indent=2))
    else:
        texts = [text_of(row) for row in rows]
        if node is None and (bare := [folder for folder, plan in plans.items() if not plan.listed]):
            name = planned.spec.name
            texts.append(f"{name} has no generated kernels on {', '.join(bare)}: Torch computes all nodes")
        click.echo("\n\n".join(texts))
