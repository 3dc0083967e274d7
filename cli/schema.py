"""The `schema` command, which prints the JSON Schemas of specs and of findings."""

import click

from specc.cli.options import SPECS, Compiling
from specc.cli.output import command_output


@click.command("schema", cls=Compiling)
@click.argument("of", type=click.Choice(["spec", "findings"]), default="spec")
@click.option("--write", is_flag=True, help="Write specs/schema.json instead of printing the schema.")
@click.option("--check", is_flag=True, help="Write nothing. Exit with 1 if specs/schema.json is out of date.")
def command(of: str, write: bool, check: bool) -> int:
    """Print the JSON Schema of specs, for completion in editors.

    `specc schema findings` prints the schema of the output of every command with `--format json`.
    """
    from specc.compiler.errors import Diagnostic
    from specc.compiler.generated_folder import replace_file

    if of == "findings":
        from specc.compiler.errors.formats import schema_text as text_of

        if write or check:
            raise click.UsageError("--write and --check are for the schema of specs")
    else:
        from specc.compiler.spec.json_schema import schema_text as text_of

    text, path = text_of(), SPECS / "schema.json"
    if write:
        replace_file(path, text)
        click.echo(f"wrote {path}")
    elif check:
        if not path.is_file() or path.read_bytes() != text.encode():
            finding = Diagnostic("F002", "the schema is outdated", "specc schema --write", str(path))
            command_output().find(finding, f"{path}: {finding.message}; run {finding.hint}")
            return 1
        click.echo(f"{path}: as generated")
    else:
        click.echo(text, nl=False)
    return 0
