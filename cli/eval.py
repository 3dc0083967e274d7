"""The `eval` command, which scores a model. It imports Torch only when it runs."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from specc.cli.options import (
    device_option,
    folder,
    json_option,
    model_argument,
    number_option,
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
    help="Data to score. For a text model: a file or folder of text, jsonl, parquet or token shards, or `stdlib`. "
    "For a model that maps lines to lines: a file of lines, or generated lines: `polynomial` or `polynomial:SPLIT`. "
    "By default, the data of the run.",
)
@number_option("--batch", help="Number of windows or lines per batch. By default, the number of the spec.")
@number_option("--window", help="Tokens per window. By default, the number of the spec.")
@number_option("--stride", help="Tokens between the starts of two windows. By default, the stride of the spec.")
@click.option(
    "--adapt",
    metavar="KIND",
    help="Adapt the model to the text while scoring it: slot, slot_causal or ttt, or settings such as "
    "`{kind: slot, steps: 3}`. The result is reported separately from the score of the model, and "
    "is marked as causal or non-causal.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=folder,
    metavar="FILE",
    help="Score the examples of a file instead of data: multiple choice, cloze, or texts. Repeatable.",
)
@number_option("--max-tokens", metavar="N", help="Score only the first N tokens.")
@click.option("--quantized", is_flag=True, help="Score the quantized model of a run.")
@number_option(
    "--gpus",
    help="Number of processes on this machine, one per GPU. The processes use the CPU with --target cpu, or if the run "
    "used the CPU and this machine has no suitable GPU.",
)
@device_option
@tokenizers_option
@json_option
def command(
    model: Path,
    gpus: int | None,
    target: str | None,
    tokenizers: tuple[Path, ...],
    as_json: bool,
    tasks: tuple[Path, ...],
    **options: Any,
) -> int:
    """Score a run or an artifact on the validation split, or on tasks that files define.

    The score of a text model is in bits per byte. The score of a model that maps lines to lines is exact match. Results
    of tasks are recorded in the run.
    """
    from specc.runtime.distributed.launch import cpu_target, is_launched
    from specc.runtime.open_model import spec_at

    if gpus is not None and not is_launched():
        spec = spec_at(model)
        if (code := launched(gpus, spec, target or cpu_target(model, spec))) is not None:
            return code
    from specc.runtime.eval.evaluate import evaluate as score
    from specc.runtime.eval.options import EvaluateOptions

    stages = Stages()
    with joined_world() if is_launched() else nullcontext() as world:
        leads = world is None or world.rank == 0
        quantized = options.pop("quantized")
        result = score(
            model,
            EvaluateOptions(**options),
            target=target,
            quantized=quantized,
            search=with_data(tokenizers, options["data"]),
            say=say if leads else None,
            progress=(lambda done, total: stages("score", done, total)) if leads else None,
            world=world,
            gpus=gpus,
            tasks=tasks,
        )
        if leads:
            click.echo(json.dumps(result.facts(), indent=2) if as_json else "\n".join(result.report()))
    return 0
