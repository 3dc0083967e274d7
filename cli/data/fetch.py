"""The `data fetch` command, which downloads token shards."""

import shlex
from pathlib import Path

import rich_click as click

from specc.cli.options import folder, format_option
from specc.cli.output import say


@click.command("fetch")
@click.argument("name", metavar="fineweb-sp1024|fineweb-sp8192")
@click.option("--out", type=folder, required=True, help="Folder to fill. An interrupted download resumes there.")
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of training shards, of 100 million tokens each.",
)
@click.option("--repo", help="Dataset repository with the same files. By default, the official one.")
@click.option("--revision", help="Branch, tag or commit of the repository. By default, main.")
@format_option
def command(name: str, out: Path, shards: int, repo: str | None, revision: str | None) -> None:
    """Download token shards of FineWeb and their tokenizer from the Hugging Face hub.

    No other command uses the network.
    """
    from specc.runtime.data.shards.fetch import SETS
    from specc.runtime.data.shards.fetch import fetch as bring

    if name not in SETS:
        raise click.UsageError(f"no set is named {name}; there are {', '.join(SETS)}")
    record = bring(name, out, shards, say, repo, revision)
    tokens = sum(shard.tokens for split in record.splits.values() for shard in split.shards)
    click.echo(f"{out}: {tokens:,} tokens of {record.tokenizer}")
    click.echo("next: specc data check {0}; specc train SPEC --data {0}".format(shlex.quote(str(out))))
