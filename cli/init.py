"""The `init` command, which copies a spec to start a new spec."""

from pathlib import Path

import click

from specc.cli.options import SPECS, Compiling
from specc.compiler.text.shell import shell_path


@click.command("init", cls=Compiling)
@click.argument("name")
@click.option(
    "--from",
    "origin",
    type=click.Path(path_type=Path),
    required=True,
    help="Spec to copy: a file, the name of a spec in specs/, or the name of an example of specc, such as gpt_mini.",
)
@click.option(
    "--small",
    is_flag=True,
    help="Change sizes so that the copy trains on a CPU within a minute and needs no files. It has few steps, short "
    "rows, bytes as tokens, and the fewest layers and features with which the spec is valid.",
)
def command(name: str, origin: Path, small: bool) -> None:
    """Copy a spec, with its comments, to a new name."""
    from specc.compiler.init import copied, origin_of

    path = origin if origin.suffix == ".yaml" else origin_of(str(origin), SPECS)
    target = SPECS / f"{name}.yaml"
    copied(path, target, name, small)
    click.echo(f"wrote {target}; next: specc {'train' if small else 'plan'} {shell_path(target)}")
