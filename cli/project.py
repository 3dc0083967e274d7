"""The folders of a project, and the specs and targets that command arguments select."""

from pathlib import Path
from typing import Any

import rich_click as click

SPECS = Path("specs")


def all_specs() -> list[Path]:
    specs = sorted(SPECS.glob("*.yaml"))
    if not specs:
        raise click.UsageError(f"there are no specs in {SPECS}/ here")
    return specs


def generated_beside(spec: Path) -> Path:
    """Returns the folder of the generated code of a spec's project: next to the spec, or next to the folder specs/ that
    contains it."""
    folder = spec.parent
    if (folder.name or folder.absolute().name) == "specs":
        folder = folder.parent if folder.name else Path("..")
    return folder / "generated"


def only_spec() -> Path:
    """Returns the only spec in specs/, for commands whose spec is optional. Raises UsageError, with the choices, if
    there are several."""
    specs = all_specs()
    if len(specs) > 1:
        raise click.UsageError(f"name a spec: {', '.join(map(str, specs))}")
    return specs[0]


def planned(path: Path, overrides: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns the spec of a file and its lock. Raises SpecError with every problem if the spec cannot be planned."""
    from specc.compiler.build import plan_loaded
    from specc.compiler.plan.lock import lock_path, read_lock
    from specc.compiler.spec.check import load

    spec, source = load(path, overrides)
    lock = read_lock(lock_path(path, spec.name))
    plan_loaded(spec, source, (), lock)
    return spec, lock


def checked_targets(spec: Path, target: str | None) -> tuple[str, ...]:
    """Returns the targets that an option selects. Raises UsageError if the spec does not list the target."""
    if target is None:
        return ()
    from specc.compiler.spec.check import load

    known = load(spec)[0].targets
    if target not in known:
        raise click.UsageError(f"{spec} is not built for {target}; its targets are {', '.join(known)}")
    return (target,)
