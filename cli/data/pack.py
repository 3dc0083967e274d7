"""The `data pack` command, which packs text into token shards."""

import shlex
import sys
from pathlib import Path
from typing import Any

import rich_click as click

from specc.cli.options import folder, format_option, tokenizers_option
from specc.cli.output import say


@click.command("pack")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=folder, required=True, help="Folder to create.")
@click.option("--tokenizer", required=True, help="`bytes`, a SentencePiece *.model file or a tiktoken rank file.")
@click.option("--validation", multiple=True, metavar="INPUT", help="Text for the validation split only. Repeatable.")
@click.option(
    "--validation-fraction",
    "share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
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
    help="End of a document: a line `<|endoftext|>`, a blank line, the record (always so in jsonl), or the file.",
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(1, 2**31 - 1),
    default=100_000_000,
    show_default=True,
    help="Tokens per shard.",
)
@tokenizers_option
@format_option
def command(
    inputs: tuple[str, ...],
    out: Path,
    tokenizer: str,
    validation: tuple[str, ...],
    share: float | None,
    marks: Any,
    bounds: Any,
    shard_tokens: int,
    tokenizers: tuple[Path, ...],
) -> None:
    """Pack text, jsonl or parquet into a folder of token shards.

    Text and jsonl may be compressed as .xz or .gz. By default, the splits are the same as in training on the text
    itself: files or folders named train* and val*, or else one document in ten for validation.
    """
    from specc.runtime.data.shards.pack import PackOptions
    from specc.runtime.data.shards.pack import pack as make

    if validation and share is not None:
        raise click.UsageError("--validation and --validation-fraction: name one of them")
    where = (*tokenizers, Path())
    options = PackOptions(inputs, out, tokenizer, validation, share, bounds, marks, shard_tokens, where)

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
            f"({per_token} bytes a token), {len(split.shards)} shards"
        )
    click.echo("next: specc data check {0}; specc train SPEC --data {0}".format(shlex.quote(str(out))))
