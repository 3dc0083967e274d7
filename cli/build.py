"""The `build` command, which writes the generated code of a spec."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specc.cli.options import Compiling, SpecPath, all_specs, generated_beside, only_spec
from specc.cli.output import command_output, tell

if TYPE_CHECKING:
    from specc.compiler.errors import Diagnostic


@click.command("build", cls=Compiling)
@click.argument("specs", nargs=-1, type=SpecPath())
@click.option("--all", "every", is_flag=True, help="Build every spec in specs/.")
@click.option(
    "--check",
    is_flag=True,
    help="Write nothing. List the files that differ from a build, and exit with 1 if there are any.",
)
@click.option("--diff", is_flag=True, help="Write nothing. Print the changes that a build would make.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand or built from another spec.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="Folder of the generated code. By default, generated/ next to the specs/ folder that contains the spec, or "
    "next to the spec itself if it is not in a specs/ folder.",
)
def command(specs: tuple[Path, ...], every: bool, check: bool, diff: bool, force: bool, into: Path | None) -> int:
    """Write the generated code of a spec.

    The code is written to generated/NAME/. With --check or --diff, SPEC may be `-` for standard input.
    """
    from specc.compiler.build import compile_spec
    from specc.compiler.generated_folder import drift, unified, write
    from specc.compiler.text.source import STDIN

    if STDIN in specs and not (check or diff):
        raise click.UsageError("a spec on standard input can only be compared: add --check or --diff")
    if force and (check or diff):
        raise click.UsageError("--force overwrites files, but --check and --diff write nothing")
    chosen = all_specs() if every else list(specs) or [only_spec()]
    outputs = {path: compile_spec(path) for path in chosen}
    folders: dict[Path, Path] = {}
    for path, built in outputs.items():
        folder = (into or generated_beside(path)) / built.spec.name
        if (first := folders.setdefault(folder, path)) != path:
            raise click.UsageError(f"{first} and {path} are both named {built.spec.name}")
    findings: list[Diagnostic] = []
    output = command_output()
    for (path, built), folder in zip(outputs.items(), folders, strict=True):
        tell(built.lock_use.note(path))
        if diff:
            text = unified(folder, built.files, built.spec.name)
            findings += [_drifted(folder, "changed")] * bool(text)
            click.echo(text, nl=False)
        elif check:
            findings += [_drifted(folder / entry.path, entry.state) for entry in drift(folder, built.files)]
        else:
            changes = write(folder, built.files, force)
            for state, name in changes:
                click.echo(f"{state:<8} {folder / name}")
            click.echo(
                f"{folder}: {len(built.files)} files, {len(changes)} written" if changes else f"{folder}: up to date"
            )
    if check and every:
        roots = {folder.parent for folder in folders}
        beside = sorted(path for root in roots for path in root.glob("*") if path.is_dir() and path not in folders)
        findings += [_drifted(path, "extra folder") for path in beside]
    for finding in findings:
        output.find(finding, f"{finding.file}: {finding.message}" if check else None)
    if check and not findings:
        click.echo(f"{len(chosen)} spec{'s' if len(chosen) > 1 else ''}: up to date", err=output.form == "github")
    return 1 if findings else 0


def _drifted(path: Path, state: str) -> "Diagnostic":
    from specc.compiler.errors import Diagnostic

    message = {"extra": "extra: no build writes it, so delete it", "extra folder": "extra"}.get(state, state)
    return Diagnostic("F001", message, "" if state.startswith("extra") else "specc build", str(path))
