"""Scores the model of a run or an artifact on tasks from files."""

from collections.abc import Callable, Sequence
from pathlib import Path

from specc.compiler.spec.train import BitsSpec
from specc.runtime.distributed.world import World
from specc.runtime.eval.options import EvaluateError, EvaluateOptions, memory, windows_of
from specc.runtime.eval.recording import record_result
from specc.runtime.eval.tasks.rows import Encoder, loads_of, score_rows
from specc.runtime.eval.tasks.task import Task, TaskResult, TaskResults, digest_of, read_task
from specc.runtime.eval.text import compiled
from specc.runtime.metrics.share import Share
from specc.runtime.open_model import OpenedModel


def read_tasks(paths: Sequence[Path], options: EvaluateOptions) -> list[tuple[Path, Task]]:
    """Reads task files. Returns pairs (path of the file, task).

    Raises EvaluateError if `options` has `data`, `adapt` or `max_tokens`, because these options do not apply to tasks.
    Also raises the errors of `read_task`.
    """
    for option in ("data", "adapt", "max_tokens"):
        if getattr(options, option) is not None:
            message = f"--{option.replace('_', '-')} does not apply to --task"
            raise EvaluateError(message, "leave this option out, or score data in a call without --task")
    return [(path, read_task(path)) for path in paths]


def evaluate_tasks(
    opened: OpenedModel,
    files: Sequence[tuple[Path, Task]],
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> TaskResults:
    """Scores an opened text model on tasks. Records the results in the run directory of the model.

    Args:
        opened: the model.
        files: the tasks, as pairs (path of the file, task).
        options: the options of the evaluation. The function uses only the window, the stride and the batch.
        progress: is called as `progress(scored, total)`. `scored` is the number of rows that this process has scored.
            `total` is the number of rows that this process must score.
        world: the processes that share the work.

    Returns:
        The results of all tasks, which are equal on all processes.

    Raises:
        EvaluateError: if the model is not a text model, or the options do not apply to the model.
        DataError: if the model cannot score an example.
        RunFailure: if the loss is not finite, or the GPU has too little memory.
    """
    if not isinstance(opened.spec.eval, BitsSpec):
        raise EvaluateError(f"{opened.path} is not a text model", "tasks are for text models")
    world = world or World.alone()
    plan = windows_of(opened.spec, options, str(opened.path))
    if opened.spec.model.unscored and any(task.key == "text" for _, task in files):
        raise EvaluateError(f"{opened.path} cannot score the first tokens of a window", "score texts with --data")
    encoder = Encoder(opened.tokenizer, plan.length, plan.step, opened.spec.model.unscored)
    score = compiled(opened, options)(opened.text_model.score)
    results = []
    for path, task in files:
        grouped = task.rows(encoder)
        rows = [row for group in grouped for row in group]
        share = Share(world.rank, world.size, world.totals)
        with memory():
            flat = score_rows(
                opened,
                rows,
                plan.batch,
                task.greedy,
                share,
                score,
                fixed_length=options.compiled and opened.device.type == "cuda",
                progress=progress,
            )
            loads = loads_of(opened, rows)
        scores = iter(flat)
        measures = task.measures(grouped, [[next(scores) for _ in group] for group in grouped])
        counts = (sum(row.scored for row in rows), sum(row.size for row in rows), sum(row.truncated for row in rows))
        result = TaskResult(task.name, path.name, digest_of(path), len(grouped), *counts, measures, loads)
        results.append(result)
        if world.rank == 0:
            record_result(opened, result.facts())
    return TaskResults(tuple(results))
