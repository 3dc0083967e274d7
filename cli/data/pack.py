"""The `data pack` command, which packs text into token shards."""

import re
import sys
from pathlib import Path
from typing import Any

import click

from specc.cli.options import FiniteRange, folder, number_option, tokenizer_of, tokenizers_option
from specc.cli.output import say
from specc.compiler.text.shell import shell_path


def _plain(ctx: click.Context, parameter: click.Parameter, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}", name) or re.search("train|val|bytes", name, re.IGNORECASE):
        raise click.BadParameter("use letters, digits, `.` and `-`, without the words train, val and bytes")
    return name


@click.command("pack")
@click.argument("sources", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=folder, required=True, help="Folder to create.")
@click.option("--tokenizer", required=True, help="`bytes`, a file *.json, *.model or *.tiktoken, or a spec *.yaml.")
@click.option("--validation", multiple=True, metavar="INPUT", help="Text for the validation split only. Repeatable.")
@click.option(
    "--validation-fraction",
    "share",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    help="Share of the documents in the validation split, chosen by the SHA-256 of their bytes.",
)
@click.option(
    "--bos",
    "marks",
    type=click.Choice(["document", "none"]),
    default="document",
    show_default=True,
    help="Write the BOS token before each document, or only at the start of a split.",
)
@click.option(
    "--bounds",
    type=click.Choice(["endoftext", "blank-line", "record", "file"]),
    help="End of each document: a line `<|endoftext|>`, a blank line, the end of a record (always in jsonl) or "
    "of the file.",
)
@click.option(
    "--name",
    default="tokens",
    show_default=True,
    callback=_plain,
    help="Prefix of the names of the shards, as in NAME_train_000000.bin.",
)
@number_option("--shard-tokens", default=100_000_000, most=2**31 - 1, help="Tokens per shard.")
@tokenizers_option
def command(tokenizers: tuple[Path, ...], **settings: Any) -> None:
    """Pack text, jsonl, parquet or folders of `datasets` into a folder of token shards.

    Text and jsonl may be compressed as .xz, .gz or .zst. By default, files and folders named train* form the training
    split, and files and folders named val* form the validation split. If no file or folder has such a name, one
    document in ten belongs to the validation split.
    """
    from specc.runtime.data.shards.pack import PackOptions
    from specc.runtime.data.shards.pack import pack as make

    if settings["validation"] and settings["share"] is not None:
        raise click.UsageError("--validation and --validation-fraction exclude each other")
    settings["tokenizer"], search = tokenizer_of(settings["tokenizer"], (*tokenizers, Path()))
    options = PackOptions(**settings, search=search)

    begun: list[str] = []

    def show(split: str, done: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{split:<6} {done / 1e6:,.0f} MB", err=True, nl=False)
        elif split not in begun:
            begun.append(split)
            say(f"{split} ...")

    record = make(options, show, say)
    if sys.stderr.isatty():
        click.echo(err=True)
    for name, split in record.splits.items():
        tokens = sum(shard.tokens for shard in split.shards)
        per_token = f"{split.document_bytes / tokens:.3f}" if split.document_bytes is not None else "?"
        click.echo(
            f"{name:<6} {split.documents:,} documents, {split.document_bytes:,} bytes, {tokens:,} tokens "
            f"({per_token} bytes per token), {len(split.shards)} shards"
        )
    click.echo("next: specc data check {0}; specc train SPEC --data {0}".format(shell_path(options.out)))
