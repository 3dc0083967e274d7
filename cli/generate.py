"""The `generate` command, which decodes with a model. It imports Torch only when it runs."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
from click import get_current_context
from click.core import ParameterSource

from specc.cli.options import device_option, model_argument, number_option, tokenizers_option
from specc.cli.output import say, stream

if TYPE_CHECKING:
    from specc.runtime.decode.sampling import Sampling
    from specc.runtime.open_model import OpenedModel

MAX_SEED = 2**63 - 1  # below the limit of torch's generators, because later samples have larger seeds
OF_TEXTS = ("prompt", "prompts", "batch", "max_tokens", "temperature", "top_k", "top_p", "seed", "samples", "compile")
OF_LINES = ("beam",)


def _refuse_options(beside: str, names: tuple[str, ...]) -> None:
    origin = get_current_context().get_parameter_source
    odd = [f"--{name.replace('_', '-')}" for name in names if origin(name) is not ParameterSource.DEFAULT]
    if odd:
        raise click.UsageError(
            f"{', '.join(odd)} {'has' if len(odd) == 1 else 'have'} no effect together with {beside}"
        )


def _utf8(prompt: str) -> bytes:
    text = os.fsencode(prompt)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--prompt is not valid UTF-8 at byte {error.start}") from None
    return text


def _read_lines(file: BinaryIO) -> list[str]:
    """Returns the lines of a file. Raises UsageError if the file is not valid UTF-8."""
    from specc.runtime.data.tokenizers.characters import lines_of

    try:
        return lines_of(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file.name} is not valid UTF-8 at byte {error.start}") from None


def _write_many(
    opened: "OpenedModel",
    prompts: BinaryIO,
    max_tokens: int,
    sampling: "Sampling",
    seed: int,
    batch: int,
    compiled: bool,
) -> None:
    """Prints a JSON object with `prompt` and `text` for each line of `prompts`, in order.

    Args:
        opened: the text model, with a paged cache.
        prompts: the file of prompts.
        max_tokens: the maximum number of tokens per text.
        sampling: the sampling settings.
        seed: the seed of the first text. The following texts have the seeds `seed` + 1, `seed` + 2, ...
        batch: the maximum number of texts that the model generates at the same time.
        compiled: whether to compile decoding steps with torch.compile.

    Raises:
        UsageError: if the file has no prompt or is not valid UTF-8, or if the model maps lines to lines.
    """
    from specc.runtime.generate import generate_many

    if opened.spec.model.reads == "lines":
        raise click.UsageError(f"{opened.spec.name} maps lines to lines: use --lines FILE")
    starts = _read_lines(prompts)
    if not starts:
        raise click.UsageError(f"{prompts.name} has no prompts: write one per line")
    texts: dict[int, bytes] = {}
    printed, seeds = 0, range(seed, seed + len(starts))
    for index, text in generate_many(
        opened, starts, max_tokens, sampling, seeds, batch=batch, say=say, compiled=compiled
    ):
        texts[index] = text
        while printed in texts:
            entry = {"prompt": starts[printed], "text": texts.pop(printed).decode(errors="replace")}
            click.echo(json.dumps(entry, ensure_ascii=False))
            printed += 1


@click.command("generate")
@model_argument
@click.option("--prompt", default="", help="Start of the text.")
@click.option(
    "--prompts",
    type=click.File("rb"),
    help="File with one prompt per line, or `-` for standard input. Texts of different lengths are decoded together.",
)
@number_option("--batch", default=32, help="Maximum number of texts at once, for --prompts.")
@click.option(
    "--lines",
    type=click.File("rb"),  # binary, because in text mode a single carriage return would end a line
    help="File of lines to transform, or `-` for standard input. For a model that maps lines to lines.",
)
@number_option("--beam", most=1024, help="Beam width for --lines. By default, the beam width of the spec.")
@number_option("--max-tokens", default=200, least=0, help="Maximum number of new tokens.")
@click.option(
    "--temperature",
    type=float,
    default=1.0,
    show_default=True,
    help="Sampling temperature. 0 always takes the most probable token.",
)
@click.option("--top-k", metavar="K", type=int, help="Sample from the K most probable tokens.")
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Sample from the smallest set of tokens that has this probability.",
)
@number_option("--seed", default=0, least=0, most=MAX_SEED, help="Seed of the sampling.")
@number_option("--samples", default=1, help="Number of texts. Their seeds are SEED, SEED + 1, ...")
@click.option("--compile", is_flag=True, help="Compile decoding steps with torch.compile, which takes a minute.")
@click.option("--quantized", is_flag=True, help="Use the quantized model of a run.")
@device_option
@tokenizers_option
def command(
    model: Path,
    prompt: str,
    prompts: BinaryIO | None,
    batch: int,
    lines: BinaryIO | None,
    beam: int | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    samples: int,
    compile: bool,
    quantized: bool,
    target: str | None,
    tokenizers: tuple[Path, ...],
) -> None:
    """Generate text with a run or an artifact, or transform lines.

    With --lines, the output has one line for each input line. With --prompts, the output has one JSON object for each
    prompt, in order.
    """
    _refuse_options("--lines" if lines is not None else "a prompt", OF_TEXTS if lines is not None else OF_LINES)
    if lines is not None:
        from specc.runtime.data.errors import LineError
        from specc.runtime.decode.lines import translator_of
        from specc.runtime.open_model import open_model

        opened = open_model(model, target, quantized=quantized, search=tokenizers, say=say)
        sources = _read_lines(lines)
        try:
            translated = translator_of(opened, beam).translate(sources)
        except LineError as error:
            raise LineError(error.row, f"{lines.name}:{error.row + 1}: {error.message}", error.hint) from error
        click.echo("".join(f"{line}\n" for line in translated), nl=False)
        return
    from specc.runtime.decode.pages import in_pages
    from specc.runtime.decode.sampling import Sampling
    from specc.runtime.generate import generate as write
    from specc.runtime.generate import generate_several
    from specc.runtime.open_model import open_model

    start = _utf8(prompt)
    if temperature == 0:
        _refuse_options("--temperature 0", ("top_k", "top_p"))
    sampling = Sampling(temperature, top_k, top_p)
    if prompts is not None:
        _refuse_options("--prompts", ("prompt", "samples"))
        opened = open_model(model, target, quantized=quantized, search=tokenizers, say=say, prepared=in_pages)
        _write_many(opened, prompts, max_tokens, sampling, seed, batch, compile)
        return
    _refuse_options("a prompt", ("batch",))
    opened = open_model(model, target, quantized=quantized, search=tokenizers, say=say)
    if opened.spec.model.reads == "lines":
        raise click.UsageError(f"{opened.spec.name} maps lines to lines: use --lines FILE")
    if samples > 1:
        seeds = range(seed, seed + samples)
        texts = generate_several(opened, start, max_tokens, sampling, seeds, say=say, compiled=compile)
        for text_seed, text in zip(seeds, texts, strict=True):
            click.echo(f"--- seed {text_seed}\n{start.decode()}{text.decode(errors='replace')}")
        return
    click.echo(start.decode(), nl=False)
    write(opened, start, max_tokens, sampling, seed, say=say, stream=stream, compiled=compile)
    click.echo()
