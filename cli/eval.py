"""The `eval` command, which scores a model. Torch is imported only when it runs."""

import json
from contextlib import nullcontext
from pathlib import Path

import rich_click as click

from specc.cli.options import (
    device_option,
    format_option,
    json_option,
    model_argument,
    stated,
    tokenizers_option,
    with_data,
)
from specc.cli.output import Stages, say
from specc.cli.processes import Repeatable, joined_world, launched


@click.command("eval", cls=Repeatable)
@model_argument
@click.option(
    "--data",
    callback=stated,
    help="A text, jsonl or token-shard file or folder, or `stdlib`; for a model of lines, a file of them, `polynomial` "
    "or `polynomial:SPLIT`. The run's own where unset.",
)
@click.option("--batch", type=click.IntRange(min=1), help="Windows, or lines, at once; the spec's where unset.")
@click.option("--window", type=click.IntRange(min=1), help="Tokens of a window; the spec's where unset.")
@click.option(
    "--stride", type=click.IntRange(min=1), help="Tokens from one window to the next; the spec's where unset."
)
@click.option(
    "--adapt",
    metavar="KIND",
    help="Let the model adapt to the text: slot, slot_causal or ttt, or settings, as `{kind: slot, steps: 3}`. What "
    "comes out is not the model's score, and says whether it is causal.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Score so many tokens of the split only.")
@click.option("--quantized", is_flag=True, help="Of a run, score the quantized model.")
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    help="Processes here, one a GPU; on the CPU with --target cpu, or where that is the run's own and no GPU fits.",
)
@device_option
@tokenizers_option
@json_option
@format_option
def command(
    model: Path,
    data: str | None,
    window: int | None,
    stride: int | None,
    adapt: str | None,
    batch: int | None,
    max_tokens: int | None,
    quantized: bool,
    gpus: int | None,
    target: str | None,
    tokenizers: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Score a run or an artifact: text in bits per byte on the validation split, lines by exact match."""
    from specc.runtime.distributed.launch import is_launched, own_cpu
    from specc.runtime.open_model import spec_at

    if gpus is not None and not is_launched():
        spec = spec_at(model)
        if (code := launched(gpus, spec, target or own_cpu(model, spec))) is not None:
            return code
    from specc.runtime.eval.evaluate import evaluate as score
    from specc.runtime.eval.options import EvaluateOptions

    stages = Stages()
    with joined_world() if is_launched() else nullcontext() as world:
        leads = world is None or world.rank == 0
        found = score(
            model,
            EvaluateOptions(data, stride, batch, max_tokens, window=window, adapt=adapt),
            target=target,
            quantized=quantized,
            search=with_data(tokenizers, data),
            say=say if leads else None,
            progress=(lambda done, total: stages("score", done, total)) if leads else None,
            world=world,
            gpus=gpus,
        )
        if leads:
            click.echo(json.dumps(found.facts(), indent=2) if as_json else "\n".join(found.report()))
    return 0
