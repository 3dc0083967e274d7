"""The `train` command. It imports Torch only when it runs."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from specc.cli.committed import compile_committed, require_built
from specc.cli.options import (
    SPECS,
    FiniteRange,
    device_option,
    folder,
    number_option,
    only_spec,
    set_option,
    stated,
    tokenizers_option,
    with_data,
)
from specc.cli.output import command_output, say
from specc.cli.processes import Repeatable, end_with_parent, joined_world, launched
from specc.compiler.text.shell import shell_path


@click.command("train", cls=Repeatable)
@click.argument("spec", required=False, type=folder)
@click.option(
    "--run", "directory", type=folder, help="Folder of the run. By default, a new runs/NAME-NNN, which is printed."
)
@click.option(
    "--data",
    callback=stated,
    help="Training data. For a text model: a file or folder of text, jsonl, parquet or token shards, or `stdlib` "
    "(the default). For a model that maps lines to lines: a file of lines, or `polynomial` (the default if the spec "
    "states this kind).",
)
@device_option
@number_option(
    "--gpus",
    help="Number of processes on this machine, one per GPU. With --target cpu, the processes run on the CPU. "
    "Options of torchrun may follow after `--`.",
)
@set_option
@click.option(
    "--resume",
    type=click.Choice(["auto"]),
    help="Resume from the newest valid checkpoint. With --run but no SPEC, all settings are taken from the run.",
)
@number_option(
    "--steps", metavar="N", least=0, help="Stop after N steps of the run in total. The schedule does not change."
)
@click.option(
    "--max-seconds",
    type=FiniteRange(min=0),
    help="Stop after this number of seconds. The schedule does not change.",
)
@click.option(
    "--track",
    multiple=True,
    metavar="NAME",
    help="Also send the records of the log to a tracker: tensorboard, trackio or wandb. Repeatable. By default, "
    "nothing leaves this machine.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Train nothing. Open the data of --data, run two steps on the CPU, and print parameters, bytes, and the "
    "estimated times and memory for the target. Needs no GPU.",
)
@tokenizers_option
def command(
    spec: Path | None,
    directory: Path | None,
    data: str | None,
    target: str | None,
    gpus: int | None,
    overrides: tuple[str, ...],
    resume: Any,
    steps: int | None,
    max_seconds: float | None,
    track: tuple[str, ...],
    dry_run: bool,
    tokenizers: tuple[Path, ...],
) -> int:
    """Train the model of a spec.

    The command fails if the folder generated/NAME beside the spec contains outdated code.

    To train on several machines, start the same command on each machine, with options of torchrun after `--`, such as
    `specc train SPEC --run DIR --gpus 8 -- --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400`.
    """
    from specc.compiler.build import plan_spec
    from specc.runtime.data.missing_paths import require_source
    from specc.runtime.distributed.launch import is_launched, target_of
    from specc.runtime.storage.run_directory import is_run

    began = time.monotonic()
    end_with_parent()
    if track:
        from specc.runtime.trackers.open import require_trackers

        require_trackers(track)  # checked before the processes start, so that the error appears only once

    with joined_world() if is_launched() else nullcontext() as world:
        known = begun(directory, spec, overrides, data) if resume else None
        stated, data, target = bool(data), data or (known and known.data), target or (known and known.target)
        if known is not None and directory is not None and spec is None:
            if overrides:
                raise click.UsageError("--set has no effect on a resumed run, because the spec of a run is fixed")
            beside, loaded, lock, overrides = SPECS, known.spec, known.lock, known.overrides
            built = None
        else:
            built = path = spec or only_spec()
            if path.is_dir() and is_run(path):
                raise click.UsageError(
                    f"{path} is a run; `specc train --run {shell_path(path)} --resume auto` continues it"
                )
            beside = path.parent
            overrides = (*overrides, *selecting(path, overrides, data))
            planned = plan_spec(path, overrides)
            loaded, lock = planned.spec, planned.lock
            if world is None and not dry_run:
                compile_committed(path, loaded, target)
        kind = loaded.train.data
        if world is None and (stated or not (known or dry_run)):
            require_source(data or kind.usual, kind)
        if dry_run:
            _dry_run(loaded, target, data, (*with_data(tokenizers, data), beside, Path()), lock)
            return 0
        if (code := launched(gpus, loaded, target, world)) is not None:
            return code
        from specc.runtime.train.train import TrainOptions
        from specc.runtime.train.train import train as run

        chosen = target_of(loaded, target, gpus)
        if built is not None and (world is None or world.rank == 0):
            require_built(built, loaded.name, chosen)
        options = TrainOptions(
            loaded,
            chosen,
            data or kind.usual,
            directory,
            overrides,
            resume,
            steps,
            max_seconds,
            (*([known.files] if known else []), *with_data(tokenizers, data), beside, Path()),
            lock=lock,
            track=track,
            place=place_of_training(built, overrides) if built is not None else "",
            began=began,
        )
        result = run(options, say, world)
        command_output().complete()
        if world is None or world.rank == 0:
            state = "complete" if result.complete else "ended early"
            state = f"reached the loss {loaded.train.stop_at_loss:g}" if result.reached else state
            click.echo(f"{result.step} steps in {result.seconds:.1f} s, {state}: {result.final.summary()}")
            click.echo(f"next: specc quantize {shell_path(result.run)}")
    return 0


def place_of_training(spec: Path, overrides: tuple[str, ...]) -> str:
    """Returns the position of `train.micro_batch` in a spec, as `file:line`. If the spec does not set this field,
    returns the position of `train`.
    """
    from specc.compiler.text.overrides import apply_overrides
    from specc.compiler.text.source import read

    place = apply_overrides(read(spec), overrides).place(("train", "micro_batch"))
    return f"{place.file}:{place.mark.line}"


def _dry_run(spec: Any, target: str | None, data: str | None, search: tuple[Path, ...], lock: Any) -> None:
    from platformdirs import user_cache_path

    from specc.runtime.bench.dry_run import dry_run
    from specc.runtime.model.load import choose_target

    chosen = choose_target(spec, target or spec.targets[-1])
    for line in dry_run(spec, chosen, data, search, user_cache_path("specc") / "tokens", say, lock).lines():
        click.echo(line)


def begun(directory: Path | None, spec: Path | None, overrides: tuple[str, ...], data: str | None) -> Any:
    """Returns the run that `train --resume` continues. None if there is no such run.

    Args:
        directory: the run directory. None for the newest run of the spec.
        spec: the spec. None for the only spec in specs/.
        overrides: the values of `--set`.
        data: the value of `--data`; None for the data of the run.

    Raises:
        RunDirectoryError: if `directory` is not a run, and `spec` is None.
    """
    from specc.compiler.spec.check import load
    from specc.runtime.storage.run_directory import Run, RunDirectoryError, is_run, newest_run

    if directory is None:
        path = spec or only_spec()
        directory = newest_run(load(path, (*overrides, *selecting(path, overrides, data)))[0].name)
    elif spec is None and not is_run(directory):
        what = "is not a run, or ended before training began" if directory.exists() else "no such run"
        raise RunDirectoryError(f"{directory}: {what}", "name another run, or add SPEC to start a new run in it")
    return Run.open(directory) if directory is not None and is_run(directory) else None


def selecting(path: Path, overrides: tuple[str, ...], data: str | None) -> tuple[str, ...]:
    """Returns an override of `train.data`, which selects the kind of data that the option `--data` names.

    The result is empty if the spec already has this kind of data, or if `--data` does not name generated data.
    """
    from specc.compiler.spec.train import generated_data
    from specc.compiler.text.overrides import apply_overrides
    from specc.compiler.text.source import read

    if data not in generated_data():
        return ()
    stated: Any = apply_overrides(read(path), overrides).data
    for key in ("train", "data", "kind"):
        stated = stated.get(key) if isinstance(stated, dict) else None
    return () if stated == data else (f"train.data={{kind: {data}}}",)
