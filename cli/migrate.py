"""The `migrate` command, which rewrites specs of an old version."""

from pathlib import Path

import click

from specc.cli.options import Compiling, StatedPath
from specc.cli.output import command_output
from specc.compiler.text.shell import shell_path


@click.command("migrate", cls=Compiling)
@click.argument("specs", nargs=-1, required=True, type=StatedPath())
@click.option("--check", is_flag=True, help="Write nothing. Exit with 1 if a spec has an old version.")
def command(specs: tuple[Path, ...], check: bool) -> int:
    """Rewrite specs of an old version in the current version.

    Comments and the names of parameters are preserved. Runs and artifacts of the old spec remain valid.
    """
    from specc.compiler.errors import Diagnostic
    from specc.compiler.generated_folder import replace_file
    from specc.compiler.spec.check import check as require_valid
    from specc.compiler.spec.migrate import migrated_text
    from specc.compiler.spec.version import has_version
    from specc.compiler.text.source import read

    old = 0
    for path in specs:
        text = migrated_text(path)
        if text is None and not has_version(source := read(path)):
            require_valid(source)  # raises all errors of the spec, such as a missing version
        old += text is not None
        if text is not None and not check:
            file = path.resolve()  # a link stays a link
            replace_file(file, text, file.stat().st_mode & 0o777)
        if text is not None and check:
            finding = Diagnostic("F003", "the spec has an old version", f"specc migrate {shell_path(path)}", str(path))
            command_output().find(finding, f"{path}: {finding.message}")
        else:
            click.echo(f"{path}: {'current' if text is None else 'rewritten'}")
    return int(check and old > 0)
