"""The `init` command, which copies a spec to start a new spec."""

import shlex
from pathlib import Path

import rich_click as click

from specc.cli.options import SPECS, Compiling


@click.command("init", cls=Compiling)
@click.argument("name")
@click.option("--from", "origin", type=click.Path(path_type=Path), required=True, help="Spec to copy.")
def command(name: str, origin: Path) -> None:
    """Copy a spec, with its comments, to a new name."""
    from specc.compiler.spec.init import copied

    path = origin if origin.suffix == ".yaml" else SPECS / f"{origin}.yaml"
    target = SPECS / f"{name}.yaml"
    copied(path, target, name)
    click.echo(f"wrote {target}; next: specc plan {shlex.quote(str(target))}")
