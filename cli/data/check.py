"""The `data check` command, which checks token shards."""

import json
from pathlib import Path

import rich_click as click

from specc.cli import options
from specc.cli.options import format_option, json_option, tokenizers_option
from specc.cli.output import Stages


@click.command("check")
@click.argument("folder", type=options.folder)
@click.option("--tokenizer", help="The one of the tokens, where no record of pack or fetch lies beside them.")
@tokenizers_option
@json_option
@format_option
def command(folder: Path, tokenizer: str | None, tokenizers: tuple[Path, ...], as_json: bool) -> int:
    """Read a folder of token shards once, and tell what it holds and what is wrong.

    Exit 5 if stored bytes are damaged, 1 for any other problem.
    """
    from specc.runtime.data.shards.check import check as read
    from specc.runtime.data.tokenizers.open import open_tokenizer

    stages = Stages()
    opened = open_tokenizer(tokenizer, (*tokenizers, folder, Path())) if tokenizer is not None else None
    found = read(folder, opened, lambda done, total: stages("check", done, total))
    if as_json:
        click.echo(json.dumps(found.facts(), indent=2))
    else:
        for line in found.report():
            click.echo(line)
    return found.exit_code
