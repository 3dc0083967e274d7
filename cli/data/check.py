"""The `data check` command, which checks token shards."""

import json
from pathlib import Path

import click

from specc.cli import options
from specc.cli.options import json_option, tokenizer_of, tokenizers_option
from specc.cli.output import Stages, command_output


@click.command("check")
@click.argument("folder", type=options.folder)
@click.option(
    "--tokenizer", help="Tokenizer of the shards, for folders that `data pack` or `data fetch` did not write."
)
@tokenizers_option
@json_option
def command(folder: Path, tokenizer: str | None, tokenizers: tuple[Path, ...], as_json: bool) -> int:
    """Read a folder of token shards, and report its contents and problems.

    The exit code is 5 if the shards are damaged, and 1 for any other problem.
    """
    from specc.compiler.errors import Diagnostic
    from specc.runtime.data.shards.check import check as read
    from specc.runtime.data.tokenizers.open import open_tokenizer

    stages = Stages()
    opened = None
    if tokenizer is not None:
        opened = open_tokenizer(*tokenizer_of(tokenizer, (*tokenizers, folder, Path())))
    check = read(folder, opened, lambda done, total: stages("check", done, total))
    if as_json:
        click.echo(json.dumps(check.facts(), indent=2))
    else:
        for line in check.report():
            click.echo(line)
    for finding in check.findings:
        code = "I002" if finding.damage else "F007"
        command_output().find(Diagnostic(code, str(finding), "", str(folder)))
    return check.exit_code
