"""The `sweep` command, which trains a spec with many settings and seeds. Torch is imported only to count GPUs."""

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specc.cli.options import (
    FiniteRange,
    folder,
    json_option,
    number_option,
    picture_option,
    stated,
    tokenizers_option,
    with_data,
)
from specc.cli.output import say

if TYPE_CHECKING:
    from specc.runtime.sweep.folder import SweepFolder
    from specc.runtime.sweep.plan import PlannedQuantization, PlannedRun
    from specc.runtime.sweep.work import Job, Outcome


@click.command("sweep")
@click.argument("file", type=folder)
@click.option("--out", "directory", type=folder, help="Folder of the sweep. By default, runs/ and the name of FILE.")
@click.option("--data", callback=stated, help="Training data, instead of the data that FILE names.")
@click.option("--target", help="Target of all runs, instead of the target that FILE names.")
@number_option(
    "--jobs",
    default=1,
    help="Number of runs at the same time on each GPU, or on the CPU. Runs on the CPU share its cores.",
)
@number_option("--gpus", help="Number of GPUs to use. By default, all visible GPUs.")
@click.option("--dry-run", is_flag=True, help="Check the file and all specs, list the runs, and start none.")
@click.option("--table", is_flag=True, help="Start no run, and print the results so far.")
@click.option("--extend", is_flag=True, help="Accept a FILE with more settings or seeds than the folder has.")
@click.option("--max-seconds", type=FiniteRange(min=0), help="Start no run after this number of seconds.")
@picture_option("Write a picture of the results.")
@tokenizers_option
@json_option
def command(
    file: Path,
    directory: Path | None,
    data: str | None,
    target: str | None,
    jobs: int,
    gpus: int | None,
    dry_run: bool,
    table: bool,
    extend: bool,
    max_seconds: float | None,
    picture: Path | None,
    tokenizers: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Train a spec with many settings and seeds, and compare the results.

    FILE names the spec and the seeds. FILE may also contain a list of settings, a grid of settings, or both. All specs
    are checked before the first run starts. Each run is an ordinary run of `specc train` in the folder of the sweep.
    The same command continues an interrupted sweep. Finished runs are not repeated. An interrupted run resumes from its
    last checkpoint. A failed run does not stop the other runs. If a run fails, the exit code is 4.
    """
    from specc.runtime.storage.run_directory import locked
    from specc.runtime.sweep.folder import SweepFolder, require_free_or_begun
    from specc.runtime.sweep.plan import read_sweep
    from specc.runtime.sweep.results import results_of

    if picture is not None:
        from specc.runtime.pictures import require_matplotlib

        require_matplotlib("the picture of a sweep")
        if not picture.parent.is_dir():
            raise click.UsageError(f"there is no folder {picture.parent} for the picture")
    until = math.inf if max_seconds is None else time.monotonic() + max_seconds
    sweep = read_sweep(file, data, target)
    directory = directory or Path("runs") / file.stem
    if not table:
        require_free_or_begun(directory)
    if dry_run:
        for work in sweep.work:
            click.echo(f"{work.name}: {work.setting}")
        click.echo(f"{len(sweep.runs)} runs of {len(sweep.settings)} settings, all specs are valid")
        return 0
    if table:
        sweep_folder, failed = SweepFolder.existing(directory, sweep), dict[str, str]()
    else:
        from specc.runtime.sweep.work import slots_of, threads_of

        slots = slots_of(sweep.targets, jobs, gpus)
        with locked(directory):
            sweep_folder = SweepFolder.open(directory, sweep, threads_of(len(slots)), extend)
            places = with_data((*tokenizers, sweep.spec.parent), data)
            outcome = _run(sweep_folder, slots, places, until)
            failed = outcome.failed
            if outcome.left:
                say(f"{outcome.left} runs are not started; the same command continues")
    results = results_of(sweep_folder, failed)
    if not table:
        sweep_folder.write_results(results.facts())
    click.echo(json.dumps(results.facts(), indent=2) if as_json else "\n".join(results.table()))
    if picture is not None:
        from specc.runtime.storage.atomic import write_atomically
        from specc.runtime.sweep.picture import sweep_picture

        if not any(row.metric is not None for row in results.settings):
            say("no picture: no run is finished")
        else:
            write_atomically(picture, [sweep_picture(results, f"{file.stem}: {sweep.spec.stem}")])
            say(f"wrote {picture}")
    return 4 if failed else 0


def _run(sweep_folder: "SweepFolder", slots: Any, tokenizers: tuple[Path, ...], until: float) -> "Outcome":
    from specc.runtime.storage.quantized_run import is_quantized
    from specc.runtime.sweep.work import run_jobs

    sweep, threads = sweep_folder.sweep, sweep_folder.record.threads
    left = [run for run in sweep.runs if not sweep_folder.is_finished(run)]
    if len(left) < len(sweep.runs):
        say(f"{len(sweep.runs) - len(left)} of {len(sweep.runs)} runs are finished")
    outcome = run_jobs([_training(sweep_folder, run, tokenizers) for run in left], slots, threads, until, say)
    finished = {run.name for run in sweep.runs if sweep_folder.is_finished(run)}
    entries = [e for e in sweep.quantizations if e.of in finished and not is_quantized(sweep_folder.quantized(e))]
    jobs = [_quantization(sweep_folder, entry, tokenizers) for entry in entries]
    more = run_jobs(jobs, slots, threads, until, say)
    outcome.failed |= more.failed
    outcome.left += more.left
    return outcome


def _options(sweep_folder: "SweepFolder", overrides: tuple[str, ...], tokenizers: tuple[Path, ...]) -> list[str]:
    sweep = sweep_folder.sweep
    options = [*(["--data", sweep.data] if sweep.data else []), *(["--target", sweep.target] if sweep.target else [])]
    options += [word for place in tokenizers for word in ("--tokenizers", str(place))]
    return [*options, *(word for text in overrides for word in ("--set", text))]


def _training(sweep_folder: "SweepFolder", run: "PlannedRun", tokenizers: tuple[Path, ...]) -> "Job":
    from specc.runtime.metrics.names import metric_of
    from specc.runtime.sweep.work import Job

    def result() -> str:
        final = sweep_folder.history(run).final
        if final is None:
            return "ended early"
        metric = metric_of(sweep_folder.sweep.metric, [final])
        value = metric.value(final)
        return f"{metric.show(value)} {metric.label}" if value is not None else "not scored"

    directory = str(sweep_folder.run(run.name))
    arguments = ["train", str(sweep_folder.spec), "--run", directory, "--resume", "auto"]
    arguments += _options(sweep_folder, run.overrides, tokenizers)
    return Job(run.name, arguments, sweep_folder.output(run.name), lambda: None, result)


def _quantization(sweep_folder: "SweepFolder", entry: "PlannedQuantization", tokenizers: tuple[Path, ...]) -> "Job":
    from specc.runtime.storage.quantized_run import quantized_report
    from specc.runtime.sweep.work import Job

    def result() -> str:
        report = quantized_report(sweep_folder.quantized(entry)) or {}
        return f"{report['artifact_bytes']:,} bytes"

    arguments = ["quantize", str(sweep_folder.run(entry.name)), *_options(sweep_folder, entry.overrides, tokenizers)]
    prepare = partial(sweep_folder.copy_run, entry)
    return Job(entry.name, arguments, sweep_folder.output(entry.name), prepare, result)
