"""The entry point `train`: creates or resumes a run, and trains the model.

loop.py contains the loop over the steps, and trainer.py computes a single step.
"""

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from platformdirs import user_cache_path

from specc.compiler.int8.products import integer_products
from specc.compiler.passes.assign_quant import Allocation, allocation
from specc.compiler.pipeline import lower
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.start import StartSpec
from specc.compiler.targets import TARGETS
from specc.runtime.calibration.input_ranges import input_scales
from specc.runtime.calibration.input_scales import InputScales
from specc.runtime.distributed.world import World
from specc.runtime.log import Reporter, RunLog, Say, Silence, open_progress, unfailing
from specc.runtime.machine import device_name, peak_memory
from specc.runtime.metrics.validation import Validates
from specc.runtime.model.code_cache import trim
from specc.runtime.model.load import Loaded, device_asked_for, initialize, instantiate
from specc.runtime.model.stored_programs import StoredPrograms, import_compiler
from specc.runtime.storage import checkpoint
from specc.runtime.storage.run_directory import (
    Run,
    RunDirectoryError,
    default_run,
    is_run,
    lasting,
    locked,
    require_free,
)
from specc.runtime.storage.start_record import StartRecord
from specc.runtime.support.native import compile_ahead
from specc.runtime.trackers.open import open_trackers, require_trackers
from specc.runtime.trackers.tracker import TrackedRun
from specc.runtime.train.determinism import deterministic_algorithms
from specc.runtime.train.loop import Limits, Loop, TrainResult
from specc.runtime.train.out_of_memory import Advice, capacity_of, out_of_memory_named
from specc.runtime.train.resume import restore_newest, run_to_resume
from specc.runtime.train.sources.source import OpenData, source_of
from specc.runtime.train.start_times import StartTimes
from specc.runtime.train.trainer import TrainableModel, Trainer
from specc.runtime.weights.start import start_from


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of a training run.

    Attributes:
        spec: the resolved spec.
        target: the target of the spec to run.
        data: the training data, in the format of the option `--data`. For text, see
            `specc.runtime.data.windows.stream.open_stream`.
        run: the run directory. None selects a directory by name. For a new run, it is the next free directory
            `runs/NAME-NNN`. For a resumed run, it is the newest directory `runs/NAME-NNN`.
        overrides: the values of the option `--set`. They are already part of `spec`. The file run.json records them.
        resume: "auto" continues from the newest valid checkpoint. Training starts from step 0 if no run exists, or if
            the run has no checkpoint yet.
        stop_after_steps: the number of steps after which the run ends early, counted from step 0. The limit does not
            change schedules.
        max_seconds: the wall-clock time of the training loop in this process, in seconds, after which the run ends
            early. The limit does not change schedules.
        search: the folders to search for the tokenizer.
        cache: the folder that caches tokenized text.
        device: a torch device. None selects the device of the target.
        compiled: whether to use torch.compile, and CUDA graphs on a GPU.
        lock: the kernels that `specc tune` measured as the fastest. A new run stores them in the run directory. A
            resumed run ignores `lock`, and uses the stored kernels.
        track: the names of the trackers that receive the records of the log.
        place: the position of the section `train` in the spec, as `file:line`, for messages; empty if unknown.
        began: the value of `time.monotonic` when the command began. The logged start time then includes imports.
    """

    spec: Spec
    target: str
    data: str
    run: Path | None = None
    overrides: tuple[str, ...] = ()
    resume: Literal["auto"] | None = None
    stop_after_steps: int | None = None
    max_seconds: float | None = None
    search: tuple[Path, ...] = ()
    cache: Path = field(default_factory=lambda: user_cache_path("specc") / "tokens")
    device: str | None = None
    compiled: bool = True
    lock: Lock = NO_LOCK
    track: tuple[str, ...] = ()
    place: str = ""
    began: float | None = None


def train(options: TrainOptions, say: Say, world: World | None = None) -> TrainResult:
    """Trains until the run is complete or ends early.

    With several processes, each process calls this function with the same options. Rank 0 prints the messages and
    writes the run directory, which must be on shared storage. Results with different numbers of processes differ only
    by rounding.

    Args:
        options: the spec, the data and the run directory.
        say: the function that receives messages for the user. Errors of this function are ignored, so that the run
            continues after the user closes the terminal.
        world: the processes that train together. None for a run with one process.

    Raises:
        RunDirectoryError, BatchError: if the options do not fit the run or the machine (exit code 2).
        EnvironmentFailure: if the machine lacks something that the run needs (3).
        RunFailure: if the loss is not finite, memory or disk is full, or the processes differ (4).
        IntegrityError: if the run is damaged (5).
        Preempted, Interrupted: after a signal (75, 130). If training has begun, a checkpoint of the current step
            exists.
        PeerLost: if another process has ended or does not answer (76).
        DataError: if the data cannot be read or do not match the spec.
    """
    with ExitStack() as stack:
        return _train(options, unfailing(say), world or World.alone(), stack)


def _train(options: TrainOptions, say: Say, world: World, stack: ExitStack) -> TrainResult:
    times = StartTimes(options.began)
    if options.began is not None:
        times.mark("imports")
    spec, device = options.spec, device_asked_for(TARGETS[options.target], options.device)
    source = source_of(spec)(spec, options.search)
    stack.enter_context(deterministic_algorithms(spec.train.deterministic, device))
    world = world.on(device)
    leads = world.rank == 0
    world.first(lambda: require_trackers(options.track))
    say = say if leads else lambda line: None
    resumed = world.first(lambda: run_to_resume(options.run, spec.name)) if options.resume is not None else None
    if resumed is None and options.run is not None:
        world.first(lambda: require_free(options.run))  # type: ignore[arg-type]
    begun = Run.open(resumed) if resumed is not None else None
    data = lasting(options.data)
    if begun is not None:
        begun.require_same(spec, options.target)
        begun.with_data(data)
    # Open the data before anything is written. A failure then leaves no folder.
    with world.in_turn("data"):  # rank 0 tokenizes the data; the other ranks read the cache that rank 0 writes
        opened = source.open(data, options.cache, stack)
    times.mark("data")
    directory = world.first(lambda: resumed or options.run or default_run(spec.name))
    if leads:
        if begun is None:
            require_free(directory)  # checked before taking the lock, because the lock adds a file to the directory
            stack.callback(_remove_unused, directory, directory.exists())
        stack.enter_context(locked(directory))
        if begun is None:
            require_free(directory)  # checked again, because another process may have created a run in the meantime
    say(f"run: {directory}")
    fresh = Run(directory, spec, options.target, data, options.overrides, options.lock, opened.digests)
    run = begun.with_data(data) if begun is not None else fresh
    run.require_data(opened.digests)
    start = _start(run, begun is not None)
    advice = Advice(spec, run.target, run.lock, world.size, options.place)
    hint = lambda: advice.hint(capacity_of(world.device))  # noqa: E731
    with out_of_memory_named("before the first step", hint):
        trainer, validation, started = _prepare(run, options, world, opened, stack, say, start, times)
    if begun is None:
        run = replace(run, start=started)
    elif started != begun.start and start is not None:
        message = f"{directory}: the weights in {start.path} differ from the weights with which the run began"
        raise RunDirectoryError(message, "the run has no checkpoint yet: start a new run")
    if begun is not None:
        restore_newest(begun, run, trainer, say)
    elif leads:  # after all checks, so that the user can repeat a failed start in the same directory
        run.create(source.files)
    reporter = Reporter(Silence(), lambda step, done: None, say)
    if leads:
        tracked = TrackedRun(directory, spec.name, run.spec_digest, spec.model_dump(mode="json"), trainer.step)
        followers = open_trackers(options.track, tracked, say, stack)
        log = stack.enter_context(closing(RunLog(run.log, partial(peak_memory, world.device), followers)))
        log.write("machine", name=device_name(world.device), system=platform.system(), cores=os.cpu_count())
        reporter = Reporter(log, stack.enter_context(open_progress(say)), say)
    limits = Limits(options.stop_after_steps, options.max_seconds)
    save = partial(checkpoint.save, run.checkpoints)
    return Loop(run, trainer, validation, reporter, limits, save, hint, times).run()


def _start(run: Run, resumes: bool) -> StartSpec | None:
    start = run.spec.train.starts_from
    if start is None or (resumes and checkpoint.all_in(run.checkpoints)):
        return None
    return start.model_copy(update={"path": run.start.path if run.start is not None else lasting(start.path)})


def _remove_unused(directory: Path, existed: bool) -> None:
    if not existed and not is_run(directory):
        shutil.rmtree(directory, ignore_errors=True)


def _prepare(
    run: Run,
    options: TrainOptions,
    world: World,
    opened: OpenData,
    stack: ExitStack,
    say: Say,
    start: StartSpec | None,
    times: StartTimes,
) -> tuple[Trainer, Validates, StartRecord | None]:
    spec, gpu = run.spec, world.device.type == "cuda"
    torch.manual_seed(spec.train.seed)
    with world.in_turn("prepare"):  # rank 0 writes the generated code and starts to compile its kernels
        loaded = instantiate(spec, run.target, run.generated, lock=run.lock)
        if gpu and world.rank == 0:
            compile_ahead(loaded.directory)
            stack.callback(trim)
    times.mark("build")
    digests = opened.digests
    world.require_same("part of the run", {"spec": run.spec_digest, "data": [digests.train, digests.val]})
    # Drawing random numbers releases the interpreter lock, so that another thread can import modules at the same time
    with ThreadPoolExecutor(1) as background:
        initialized = background.submit(initialize, loaded, spec.train.seed)
        if options.compiled and gpu:
            import_compiler()
    initialized.result()
    started = start_from(start, loaded.model, spec, say) if start is not None else None
    supply, programs = opened.supply(loaded, world, stack), loaded.programs
    inputs = tuple(name for name, _ in programs.program("train").inputs)
    expected = (*supply.feed.names, *spec.train.loss_weights)
    if inputs != expected:
        raise TypeError(f"data of kind {spec.train.data.kind} has {expected}, but the program `train` needs {inputs}")
    loaded.model.to(world.device)
    model = TrainableModel(
        loaded.model,
        programs.params,
        spec.model.window,
        run.spec_digest,
        programs.phases,
        derived=programs.derived_weights,
    )
    if spec.train.qat is not None:
        assert spec.quant is not None
        schemes = allocation(spec.quant, programs.stored)
        scales = _input_scales(run, loaded, schemes, opened, world)
        model = replace(model, schemes=schemes, input_scales=scales)
    sizes = (spec.train.at_once(world.size), spec.model.window, spec.train.context)
    programs_in_cache = StoredPrograms(sizes).compile
    trainer = Trainer(model, spec.train, supply.feed, world, options.compiled and gpu, programs_in_cache)
    return trainer, supply.validation, started


def _input_scales(run: Run, loaded: Loaded, schemes: Allocation, opened: OpenData, world: World) -> InputScales | None:
    assert run.spec.quant is not None
    calibrate, programs = run.spec.quant.calibrate, lower(run.spec, run.target)
    sources = integer_products(programs, schemes)
    rows = partial(opened.calibration, calibrate.sequences, calibrate.batch)
    leaders = {source.weight: source.leader for source in sources}
    measure = partial(input_scales, programs, sources, schemes, rows)
    return InputScales(loaded.model, leaders, measure, world) if sources else None
