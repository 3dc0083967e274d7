"""The `data fetch` command, which downloads token shards."""

import shlex
from pathlib import Path

import rich_click as click

from specc.cli.options import folder, format_option
from specc.cli.output import say


@click.command("fetch")
@click.argument("name", metavar="fineweb-sp1024|fineweb-sp8192")
@click.option("--out", type=folder, required=True, help="The folder to fill; a fetch that was ended goes on in it.")
@click.option(
    "--shards", type=click.IntRange(min=1), default=10, show_default=True, help="Train shards, of 100 million tokens."
)
@click.option("--repo", help="A dataset repository of the hub that has the same files; the set's own where unset.")
@click.option("--revision", help="A branch, tag or commit of it; main where unset.")
@format_option
def command(name: str, out: Path, shards: int, repo: str | None, revision: str | None) -> None:
    """Fetch token shards of FineWeb and their tokenizer from the Hugging Face hub.

    This is the only command that uses the network.
    """
    from specc.runtime.data.shards.fetch import SETS
    from specc.runtime.data.shards.fetch import fetch as bring

    if name not in SETS:
        raise click.UsageError(f"no set is named {name}; there are {', '.join(SETS)}")
    record = bring(name, out, shards, say, repo, revision)
    tokens = sum(shard.tokens for split in record.splits.values() for shard in split.shards)
    click.echo(f"{out}: {tokens:,} tokens of {record.tokenizer}")
    click.echo("next: specc data check {0}; specc train SPEC --data {0}".format(shlex.quote(str(out))))
