"""The `build` command, which writes the generated code of a spec."""

from pathlib import Path
from typing import Any

import rich_click as click

from specc.cli.options import Compiling, SpecPath, all_specs, format_option, generated_beside, only_spec
from specc.cli.output import error_format, tell


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
@format_option
def command(specs: tuple[Path, ...], every: bool, check: bool, diff: bool, force: bool, into: Path | None) -> int:
    """Write the generated code of a spec.

    The code is written to generated/NAME/. With --check or --diff, the spec `-` is read from standard input.
    """
    from specc.compiler.build import compile_spec
    from specc.compiler.generated_folder import drift, unified, write
    from specc.compiler.text.source import STDIN

    if STDIN in specs and not (check or diff):
        raise click.UsageError("standard input can only be compared, with --check or --diff")
    chosen = all_specs() if every else list(specs) or [only_spec()]
    outputs = {path: compile_spec(path) for path in chosen}
    folders: dict[Path, Path] = {}
    for path, built in outputs.items():
        folder = (into or generated_beside(path)) / built.spec.name
        if (first := folders.setdefault(folder, path)) != path:
            raise click.UsageError(f"{first} and {path} are both named {built.spec.name}")
    findings: list[dict[str, Any]] = []
    for (path, built), folder in zip(outputs.items(), folders, strict=True):
        tell(built.lock_use.note(path))
        if diff:
            text = unified(folder, built.files, built.spec.name)
            findings += [{"file": str(folder), "state": "changed"}] * bool(text)
            click.echo(text, nl=False)
        elif check:
            findings += [
                {"file": str(folder / entry.path), "state": entry.state} for entry in drift(folder, built.files)
            ]
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
        findings += [{"file": str(path), "state": "extra folder"} for path in beside]
    if check:
        _show(findings, len(chosen))
    return 1 if findings else 0


def _show(findings: list[dict[str, Any]], specs: int) -> None:
    """Shows the files that differ from the build, in the requested format."""
    form = error_format()
    if form == "json":
        import json

        click.echo(json.dumps(findings, indent=2))
        return
    for finding in findings:
        file, state = finding["file"], finding["state"]
        more = " (no build made it; delete it)" if state == "extra" else ""
        state = state.removesuffix(" folder")
        if form == "github":
            click.echo(f"::error file={file},title=drift::{state}{more}")
        else:
            click.echo(f"{file}: {state}{more}")
    if form == "text" and not findings:
        click.echo(f"{specs} spec{'s' if specs > 1 else ''}: as built")
