"""Scores the model of a run or an artifact: on text in bits per byte, on lines by exact match, or on tasks from
files.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from specc.compiler.build import canonical
from specc.compiler.targets import TARGETS
from specc.runtime.distributed.launch import cpu_target, started_here, target_of
from specc.runtime.distributed.world import World
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.eval.lines import ExactMatches, evaluate_lines
from specc.runtime.eval.options import EvaluateError, EvaluateOptions
from specc.runtime.eval.recording import record_score
from specc.runtime.eval.task_files import evaluate_tasks, read_tasks
from specc.runtime.eval.tasks.task import TaskResults
from specc.runtime.eval.text import Adapted, adapting, evaluate_adapted, evaluate_text
from specc.runtime.metrics.bits_per_byte import BitsPerByte
from specc.runtime.model.load import device_of
from specc.runtime.open_model import OpenedModel, Say, open_model, spec_at


def evaluate(
    path: Path,
    options: EvaluateOptions,
    *,
    target: str | None = None,
    device: str | None = None,
    quantized: bool = False,
    search: Sequence[Path] = (),
    say: Say | None = None,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
    gpus: int | None = None,
    tasks: Sequence[Path] = (),
) -> BitsPerByte | ExactMatches | Adapted | TaskResults:
    """Scores the model of a run or an artifact by the metric of its spec, or on tasks from files.

    Records the results in the run, unless `options.adapt` is set.

    Args:
        path: the run or the artifact.
        options: the data and the settings. If `options.adapt` is set, the model adapts to the text.
        target, device, quantized, search, say: the arguments of `open_model`.
        progress: is called with the number of tokens or lines that are scored so far, and the total number.
        world: the processes that share the work. Each process calls this function with a different device.
        gpus: the number of processes that the user requested; None without a request.
        tasks: files of examples. If there are any, the model is scored on these examples instead of on `options.data`.

    Returns:
        The score, or the results of `tasks`. The result is equal on all processes.

    Raises:
        EvaluateError: if `gpus` differs from the number of processes.
        RunFailure: if the processes have opened different models.
        EnvironmentFailure: if there are fewer GPUs than processes.
        RuntimeFailure: if the model cannot be opened or scored.
    """
    files = read_tasks(tasks, options) if tasks else []
    if gpus is not None and world is not None and gpus != (here := started_here(world.size)):
        raise EvaluateError(
            f"--gpus is {gpus}, but torchrun started {here} processes on this machine", "leave --gpus out"
        )
    if gpus is not None or (world is not None and world.size > 1):
        spec = spec_at(path)
        target = target_of(spec, target or cpu_target(path, spec), gpus)
        world = (world or World.alone()).on(torch.device(device or device_of(TARGETS[target])))
        device = str(world.device)
    world = world or World.alone()
    prepared = partial(adapting, options=options)
    with world.in_turn("open"):  # rank 0 compiles the kernels; the other ranks load them
        opened = open_model(path, target, device, quantized=quantized, search=search, say=say, prepared=prepared)
    if world.size > 1:
        sums = [float(weight.detach().double().sum()) for weight in opened.model.parameters()]
        world.require_same("model", {"spec": canonical(opened.spec), "weights": str(sums)})
    if files:
        return evaluate_tasks(opened, files, options, progress, world)
    if options.adapt is not None:
        return evaluate_adapted(opened, options, progress, world)
    result = METRICS[opened.spec.eval.metric](opened, options, progress, world)
    if world.rank == 0:
        try:
            record_score(opened, options, result)
        except EnvironmentFailure as error:  # if the score cannot be recorded, it is returned anyway
            (say or print)(f"not recorded in the run: {error.message}")
    return result


Scored = BitsPerByte | ExactMatches
Metric = Callable[[OpenedModel, EvaluateOptions, Callable[[int, int], None] | None, World | None], Scored]
METRICS: Mapping[str, Metric] = {"bits_per_byte": evaluate_text, "exact_match": evaluate_lines}
