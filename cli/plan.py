"""The `plan` command, which summarizes the build of a spec."""

from pathlib import Path

import click

from specc.cli.options import Compiling, SpecPath, generated_beside, json_option, set_option
from specc.cli.output import tell

STATES = ("new", "changed", "removed")
SHOWN = 3


@click.command("plan", cls=Compiling)
@click.argument("spec", type=SpecPath())
@set_option
@click.option("--diff", is_flag=True, help="Also print the changes of the generated files as unified diffs.")
@json_option
def command(spec: Path, overrides: tuple[str, ...], diff: bool, as_json: bool) -> None:
    """Summarize a spec: parameters, bytes, FLOPs, kernels and times.

    The output also lists the generated files that a build would add, change or remove. Nothing is written. The spec `-`
    is read from standard input.
    """
    from specc.compiler.build import compile_spec
    from specc.compiler.generated_folder import changes, unified
    from specc.compiler.report.summary import Summary, data, lines
    from specc.compiler.text.shell import shell_path
    from specc.compiler.text.source import STDIN

    planned = compile_spec(spec, overrides)
    folder = generated_beside(spec) / planned.spec.name
    files = changes(folder, planned.files)
    summary = Summary(planned.spec, planned.plans, planned.deployed)
    if as_json:
        import json

        more = {"files": _by_state(files), "idle_lock_entries": list(planned.lock_use.idle)}
        click.echo(json.dumps({**data(summary), **more}, indent=2))
    else:
        tell(planned.lock_use.note(spec))
        name = "SPEC" if spec == STDIN else shell_path(spec)
        click.echo("\n".join((*lines(summary, name), _files_line(folder, files))))
        if diff:
            click.echo(unified(folder, planned.files, planned.spec.name), nl=False)


def _by_state(files: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    return {state: [name for its, name in files if its == state] for state in STATES}


def _files_line(folder: Path, files: tuple[tuple[str, str], ...]) -> str:
    parts = []
    for state, names in _by_state(files).items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            parts.append(f"{len(names)} {state}: {', '.join(names[:SHOWN])}{more}")
    return f"files        {'; '.join(parts) or 'up to date'}, in {folder}"
