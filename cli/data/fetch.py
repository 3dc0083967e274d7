"""The `data fetch` command, which downloads token shards and tokenizers."""

import sys
from pathlib import Path

import click

from specc.cli.options import folder, number_option
from specc.cli.output import say
from specc.compiler.text.shell import shell_path


@click.command("fetch")
@click.argument("name", metavar="NAME")
@click.option(
    "--out", type=folder, required=True, help="Folder to fill. With the same folder, an interrupted download resumes."
)
@number_option("--shards", default=10, help="Number of training shards, of 100 million tokens each.")
@click.option("--repo", help="Repository with the same files. By default, the official repository.")
@click.option("--revision", help="Branch, tag or commit of the repository. By default, main.")
@click.option("--yes", is_flag=True, help="Download without asking.")
def command(name: str, out: Path, shards: int, repo: str | None, revision: str | None, yes: bool) -> None:
    """Download token shards or a tokenizer from the Hugging Face hub.

    NAME is a data set or the file of a tokenizer. The data sets fineweb-sp1024 and fineweb-sp8192 are shards of
    FineWeb, with their tokenizers. The tokenizer files are gpt2.tiktoken, llama3.tiktoken, qwen3.json and gemma3.model.
    The command states what it downloads, and asks for confirmation. No other command uses the network.
    """
    from specc.runtime.data.shards.fetch import SETS, fetch
    from specc.runtime.data.shards.fetch_tokenizer import TOKENIZERS, fetch_tokenizer

    if name not in SETS and name not in TOKENIZERS:
        raise click.UsageError(f"unknown name {name}; choose from {', '.join((*SETS, *TOKENIZERS))}")
    if name in TOKENIZERS:
        source, content = f"{repo or TOKENIZERS[name].repository}", f"the tokenizer {name}"
    else:
        source, content = f"datasets/{repo or SETS[name].repository}", f"the tokenizer, val and {shards} train shards"
    say(f"{content} from https://huggingface.co/{source} to {out}")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("standard input is not a terminal, so specc cannot ask; add --yes to download")
        click.confirm("download?", abort=True, err=True)
    if name in TOKENIZERS:
        path = fetch_tokenizer(name, out, say, repo, revision)
        click.echo(f"next: specc data pack INPUT --out FOLDER --tokenizer {shell_path(path)}")
        return
    record = fetch(name, out, shards, say, repo, revision)
    tokens = sum(shard.tokens for split in record.splits.values() for shard in split.shards)
    click.echo(f"{out}: {tokens:,} tokens of {record.tokenizer}")
    click.echo("next: specc data check {0}; specc train SPEC --data {0}".format(shell_path(out)))
