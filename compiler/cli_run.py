"""The commands that run a model. Torch is imported when one of them runs, not before."""

import json
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

from specc.compiler.cli import SPECS, cli, device_option, format_option, formatted, json_option, only_spec, set_option

folder = click.Path(path_type=Path)
run_argument = click.argument("run", type=folder)
model_argument = click.argument("model", type=folder, metavar="RUN|ARTIFACT")
tokenizers_option = click.option(
    "--tokenizers", multiple=True, type=folder, help="A folder to look for the tokenizer's file in; may be repeated."
)


def say(line: str) -> None:
    """Progress goes to stderr, results to stdout."""
    click.echo(line, err=True)


def with_data(extra: tuple[Path, ...], data: str | None) -> tuple[Path, ...]:
    """Where tokenizer files are looked for: what was named, and the folder of the data, where packed data has its."""
    return (*extra, Path(data)) if data is not None and Path(data).is_dir() else extra


def selecting(path: Path, overrides: tuple[str, ...], data: str | None) -> tuple[str, ...]:
    """The override that makes `--data KIND` the kind of data, where a spec with its `overrides` states another, or
    none; only for kinds that need no files."""
    from specc.compiler.spec.train import GENERATED
    from specc.compiler.text.overrides import apply_overrides
    from specc.compiler.text.source import read

    if data not in GENERATED:
        return ()
    stated: Any = apply_overrides(read(path), overrides).data
    for key in ("train", "data", "kind"):
        stated = stated.get(key) if isinstance(stated, dict) else None
    return () if stated == data else (f"train.data={{kind: {data}}}",)


class Repeatable(click.RichCommand):
    """Keeps its arguments as they were given, to run them in other processes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = [ctx.info_name, *args]
        return super().parse_args(ctx, args)


@cli.command(cls=Repeatable)
@click.argument("spec", required=False, type=folder)
@click.option("--run", "directory", type=folder, help="Run directory; runs/NAME-NNN where unset, and printed.")
@click.option(
    "--data",
    help="A text, jsonl or token-shard file or folder, or `stdlib`; for a model of lines, a file of them, or "
    "`polynomial`. Where unset, `stdlib` or `polynomial`, as the spec's kind of data is.",
)
@device_option
@click.option("--gpus", type=click.IntRange(min=1), help="Processes here, one a GPU; with --target cpu, on the CPU.")
@set_option
@click.option(
    "--resume",
    type=click.Choice(["auto"]),
    help="Go on from the newest sound checkpoint; with --run and without SPEC, all is as the run has it.",
)
@click.option("--steps", type=click.IntRange(min=0), help="End this run early; the schedule does not change.")
@click.option("--max-seconds", type=click.FloatRange(min=0), help="End this run early, after so many seconds.")
@tokenizers_option
@format_option
@formatted
def train(
    spec: Path | None,
    directory: Path | None,
    data: str | None,
    target: str | None,
    gpus: int | None,
    overrides: tuple[str, ...],
    resume: Any,
    steps: int | None,
    max_seconds: float | None,
    tokenizers: tuple[Path, ...],
) -> int:
    """Train a spec. Across machines, start it with torchrun."""
    from specc.compiler.build import compile_loaded
    from specc.compiler.plan.lock import lock_path, read_lock
    from specc.compiler.spec.check import load
    from specc.runtime.distributed.launch import is_launched, target_of

    with joined_world() if is_launched() else nullcontext() as world:
        known = begun(directory, spec, overrides, data) if resume else None
        data, target = data or (known and known.data), target or (known and known.target)
        if known is not None and directory is not None and spec is None:
            if overrides:
                raise click.UsageError("a run keeps its spec: --set has no effect on it")
            beside, loaded, lock, overrides = SPECS, known.spec, known.lock, known.overrides
        else:
            path = spec or only_spec()
            beside = path.parent
            overrides = (*overrides, *selecting(path, overrides, data))
            loaded, source = load(path, overrides)
            lock = read_lock(lock_path(path, loaded.name))
            compile_loaded(loaded, source, (), lock)
        if gpus is not None and world is not None and gpus != world.size:
            raise click.UsageError(f"--gpus {gpus}, but {world.size} processes were started")
        if gpus is not None and world is None and (code := ran_on(gpus, loaded, target)) is not None:
            return code
        from specc.runtime.train.train import TrainOptions
        from specc.runtime.train.train import train as run

        options = TrainOptions(
            loaded,
            target_of(loaded, target, gpus),
            data or loaded.train.data.usual,
            directory,
            overrides,
            resume,
            steps,
            max_seconds,
            (*([known.files] if known else []), *with_data(tokenizers, data), beside, Path()),
            lock=lock,
        )
        result = run(options, say, world)
        if world is None or world.rank == 0:
            state = "complete" if result.complete else "ended early"
            click.echo(f"{result.step} steps in {result.seconds:.1f} s, {state}: {result.final.summary()}")
            click.echo(f"next: specc quantize {shlex.quote(str(result.run))}")
    return 0


def begun(directory: Path | None, spec: Path | None, overrides: tuple[str, ...], data: str | None) -> Any:
    """The run that `train --resume` goes on with: that in the directory, or else the newest of the spec; None where it
    begins one. Raises RunDirectoryError for a directory that is none where no spec is named to begin one of."""
    from specc.compiler.spec.check import load
    from specc.runtime.storage.run_directory import Run, RunDirectoryError, is_run, newest_run

    if directory is None:
        path = spec or only_spec()
        directory = newest_run(load(path, (*overrides, *selecting(path, overrides, data)))[0].name)
    elif spec is None and not is_run(directory):
        what = "is no run, or ended before it began" if directory.exists() else "no such run"
        raise RunDirectoryError(f"{directory}: {what}", "name another one, or the SPEC too, to begin there")
    return Run.open(directory) if directory is not None and is_run(directory) else None


def ran_on(gpus: int, spec: Any, target: str | None) -> int | None:
    """The exit code of this command in so many processes; None for one, this one. Raises as `require_devices`."""
    from specc.runtime.distributed.launch import launch, require_devices

    require_devices(gpus, spec, target)
    context = click.get_current_context()
    assert context is not None
    return launch(gpus, context.meta["arguments"], say) if gpus > 1 else None


def joined_world() -> Any:
    """As `specc.runtime.distributed.world.joined`, which imports torch."""
    from specc.runtime.distributed.world import joined

    return joined()


class Stages:
    """Shows how far long work has come: a bar on a terminal, elsewhere a line a stage, and one more each `every`
    seconds."""

    def __init__(self, every: float = 30.0) -> None:
        self.stage, self._every, self._told = "", every, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        share, now = f"{stage:<12} {100 * done // max(total, 1):>3} %", time.monotonic()
        if sys.stderr.isatty():
            click.echo(f"\r{share}", err=True, nl=done >= total)
        elif stage != self.stage:
            click.echo(f"{stage} ...", err=True)
            self._told = now
        elif now - self._told >= self._every:
            click.echo(f"{share} of {total:,}", err=True)
            self._told = now
        self.stage = stage


@cli.command("eval", cls=Repeatable)
@model_argument
@click.option(
    "--data",
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
@formatted
def evaluate(
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
        if (code := ran_on(gpus, spec, target or own_cpu(model, spec))) is not None:
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


OF_TEXTS = ("prompt", "max_tokens", "temperature", "top_k", "top_p", "seed", "samples")
OF_LINES = ("beam",)


def _refuse_options(beside: str, names: tuple[str, ...]) -> None:
    """Raises UsageError for an option among these that was given: it would have no effect."""
    given = get_current_context().get_parameter_source
    odd = [f"--{name.replace('_', '-')}" for name in names if given(name) is not ParameterSource.DEFAULT]
    if odd:
        raise click.UsageError(f"{', '.join(odd)} {'has' if len(odd) == 1 else 'have'} no effect beside {beside}")


@cli.command()
@model_argument
@click.option("--prompt", default="", help="The start of a document.")
@click.option(
    "--lines",
    type=click.File("rb"),  # as text, a lone carriage return would end a line
    help="A file of lines, or -; each is turned into another line.",
)
@click.option(
    "--beam", type=click.IntRange(min=1, max=1024), help="Of lines, so many are tried at once; the spec's where unset."
)
@click.option("--max-tokens", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 takes the most probable token.")
@click.option("--top-k", type=int, help="Keep so many of the most probable tokens.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the fewest tokens of this probability.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Texts, of seeds SEED, SEED + 1, ..."
)
@click.option("--quantized", is_flag=True, help="Of a run, use the quantized model.")
@device_option
@tokenizers_option
@format_option
@formatted
def generate(
    model: Path,
    prompt: str,
    lines: BinaryIO | None,
    beam: int | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    samples: int,
    quantized: bool,
    target: str | None,
    tokenizers: tuple[Path, ...],
) -> None:
    """Continue a text with a run or an artifact; or with --lines, print the line that a model of lines makes of
    each."""
    _refuse_options("--lines" if lines is not None else "a prompt", OF_TEXTS if lines is not None else OF_LINES)
    if lines is not None:
        from specc.runtime.data.errors import LineError
        from specc.runtime.data.tokenizers.characters import lines_of
        from specc.runtime.decode.lines import translator_of
        from specc.runtime.open_model import open_model

        opened = open_model(model, target, quantized=quantized, search=tokenizers, say=say)
        try:
            given = lines_of(lines.read().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{lines.name} is not valid UTF-8 at byte {error.start}") from None
        try:
            translated = translator_of(opened, beam).translate(given)
        except LineError as error:
            raise LineError(error.row, f"{lines.name}:{error.row + 1}: {error.message}", error.hint) from error
        click.echo("".join(f"{line}\n" for line in translated), nl=False)
        return
    from specc.runtime.decode.text import Sampling
    from specc.runtime.generate import generate as write
    from specc.runtime.generate import generate_several
    from specc.runtime.open_model import open_model

    sampling = Sampling(temperature, top_k, top_p)
    opened = open_model(model, target, quantized=quantized, search=tokenizers, say=say)
    if opened.spec.model.reads == "lines":
        raise click.UsageError(f"{opened.spec.name} turns lines into lines: give it --lines FILE")
    if samples > 1:
        seeds = range(seed, seed + samples)
        texts = generate_several(opened, prompt.encode(), max_tokens, sampling, seeds, say=say)
        for own, text in zip(seeds, texts, strict=True):
            click.echo(f"--- seed {own}\n{prompt}{text.decode(errors='replace')}")
        return
    click.echo(prompt, nl=False)
    write(opened, prompt.encode(), max_tokens, sampling, seed, say=say, stream=lambda text: click.echo(text, nl=False))
    click.echo()
