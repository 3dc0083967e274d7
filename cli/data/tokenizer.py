"""The `data tokenizer` command, which trains a tokenizer."""

from typing import Any

import click

from specc.cli.options import folder, number_option
from specc.cli.output import say
from specc.compiler.text.shell import shell_path


@click.command("tokenizer")
@click.argument("sources", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "--out",
    type=folder,
    required=True,
    help="File to write: *.json or *.tiktoken for a byte-level BPE, *.model for SentencePiece.",
)
@number_option("--vocab", required=True, most=2**24, help="Number of ids, with the special tokens.")
@click.option(
    "--pattern",
    default="gpt2",
    show_default=True,
    help="Pre-tokenizer of a byte-level BPE: gpt2, gpt4, llama3, qwen, nanochat, or a regular expression.",
)
@click.option(
    "--special",
    multiple=True,
    default=["<|endoftext|>"],
    show_default=True,
    help="Special token of a byte-level BPE; the first is BOS. Repeatable.",
)
@click.option(
    "--bounds",
    type=click.Choice(["endoftext", "blank-line", "record", "file"]),
    help="End of each document, as in `data pack`.",
)
@number_option("--max-bytes", "most_bytes", default=10**9, help="Bytes of text to read.")
def command(**given: Any) -> None:
    """Train a tokenizer on text: a byte-level BPE or a SentencePiece model.

    Only the training split of the text is read. A .tiktoken file contains neither the pattern nor the special tokens,
    so that `train.data` of the spec must state both.
    """
    from specc.runtime.data.tokenizers.open import open_tokenizer
    from specc.runtime.data.tokenizers.training import TrainingText, train_tokenizer

    options = TrainingText(**given)
    train_tokenizer(options, say)
    tokenizer = open_tokenizer(str(options.out))
    click.echo(f"{options.out}: {tokenizer.vocab:,} ids")
    sources = " ".join(map(shell_path, options.sources))
    click.echo(f"next: specc data pack {sources} --out FOLDER --tokenizer {shell_path(options.out)}")
