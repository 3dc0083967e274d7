"""The folders of a project, and what the arguments of a command name in them."""

from pathlib import Path

import rich_click as click

SPECS = Path("specs")


def all_specs() -> list[Path]:
    found = sorted(SPECS.glob("*.yaml"))
    if not found:
        raise click.UsageError(f"there are no specs in {SPECS}/ here")
    return found


def generated_beside(spec: Path) -> Path:
    """The folder of the generated code of a spec's project: beside the spec, or beside the folder specs/ that it is
    in."""
    folder = spec.parent
    if (folder.name or folder.absolute().name) == "specs":
        folder = folder.parent if folder.name else Path("..")
    return folder / "generated"


def only_spec() -> Path:
    """The one spec in specs/, for commands that may go without. Raises UsageError that lists the choices."""
    found = all_specs()
    if len(found) > 1:
        raise click.UsageError(f"name a spec: {', '.join(map(str, found))}")
    return found[0]


def checked_targets(spec: Path, target: str | None) -> tuple[str, ...]:
    """The targets that an option asks for. Raises UsageError where the spec does not list it."""
    if target is None:
        return ()
    from specc.compiler.spec.check import load

    known = load(spec)[0].targets
    if target not in known:
        raise click.UsageError(f"{spec} is not built for {target}; its targets are {', '.join(known)}")
    return (target,)
