"""The `schema` command, which prints the JSON Schema of a spec."""

import rich_click as click

from specc.cli.options import SPECS, Compiling


@click.command("schema", cls=Compiling)
@click.option("--write", is_flag=True, help="Write specs/schema.json instead of printing the schema.")
@click.option("--check", is_flag=True, help="Write nothing. Exit with 1 if specs/schema.json is out of date.")
def command(write: bool, check: bool) -> int:
    """Print the JSON Schema of specs, which editors use for completion."""
    from specc.compiler.generated_folder import replace_file
    from specc.compiler.spec.json_schema import schema_text

    text, path = schema_text(), SPECS / "schema.json"
    if write:
        replace_file(path, text)
        click.echo(f"wrote {path}")
    elif check:
        stale = not path.is_file() or path.read_bytes() != text.encode()
        click.echo(f"{path}: {'stale; run specc schema --write' if stale else 'as generated'}")
        return int(stale)
    else:
        click.echo(text, nl=False)
    return 0
