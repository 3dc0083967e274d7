"""The command that writes the generated code of a spec."""

from pathlib import Path

import rich_click as click

from specc.cli.options import Compiling, format_option
from specc.cli.output import tell
from specc.cli.project import GENERATED, all_specs, only_spec


@click.command("build", cls=Compiling)
@click.argument("specs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Every spec in specs/.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 and name each file that is not as built.")
@click.option("--diff", is_flag=True, help="Write nothing; print what a build would change.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@click.option("--into", type=click.Path(path_type=Path), default=GENERATED, help="Folder of generated code.")
@format_option
def command(specs: tuple[Path, ...], every: bool, check: bool, diff: bool, force: bool, into: Path) -> int:
    """Write the generated code of a spec."""
    from specc.compiler.build import compile_spec
    from specc.compiler.generated_folder import drift, unified, write

    chosen = all_specs() if every else list(specs) or [only_spec()]
    made = {path: compile_spec(path) for path in chosen}
    owners: dict[str, Path] = {}
    for path, built in made.items():
        if (first := owners.setdefault(built.spec.name, path)) != path:
            raise click.UsageError(f"{first} and {path} are both named {built.spec.name}")
    found = 0
    for path, built in made.items():
        tell(built.lock_use.note(path))
        folder = into / built.spec.name
        if diff:
            text = unified(folder, built.files, built.spec.name)
            found += bool(text)
            click.echo(text, nl=False)
        elif check:
            for entry in drift(folder, built.files):
                found += 1
                what = " (no build made it; delete it)" if entry.state == "extra" else ""
                click.echo(f"{folder / entry.path}: {entry.state}{what}")
        else:
            changes = write(folder, built.files, force)
            for state, name in changes:
                click.echo(f"{state:<8} {folder / name}")
            click.echo(
                f"{folder}: {len(built.files)} files, {len(changes)} written" if changes else f"{folder}: up to date"
            )
    if check and every:
        for folder in sorted(path for path in into.glob("*") if path.is_dir() and path.name not in owners):
            found += 1
            click.echo(f"{folder}: extra")
    if check and not found:
        click.echo(f"{len(chosen)} spec{'s' if len(chosen) > 1 else ''}: as built")
    return 1 if found else 0
