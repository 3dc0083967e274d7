"""Trains a spec in a run directory: opens or resumes the run, loads model and data, runs the loop."""

from contextlib import ExitStack
from dataclasses import dataclass, field
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
from specc.compiler.targets import TARGETS
from specc.runtime.calibration.input_ranges import input_scales
from specc.runtime.calibration.input_scales import InputScales
from specc.runtime.distributed.world import World
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.log import RunLog, Say, Silence, open_progress
from specc.runtime.metrics.validation import Validates
from specc.runtime.model.load import Loaded, device_of, initialize, instantiate
from specc.runtime.storage import checkpoint
from specc.runtime.storage.committed import sweep
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.storage.run_directory import (
    Run,
    RunDirectoryError,
    default_run,
    is_run,
    lasting,
    locked,
    newest_run,
    require_free,
)
from specc.runtime.support.native import compile_ahead
from specc.runtime.train.loop import Limits, Loop, TrainResult
from specc.runtime.train.sources.source import OpenData, Ready, source_of
from specc.runtime.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train, on what, and where.

    Attributes:
        spec, target: the resolved spec, and which of its targets to run.
        data: what the spec's kind of data takes: for text, see `specc.runtime.data.windows.stream.open_stream`.
        run: the run directory; None takes the next free `runs/NAME-NNN`, or to resume the newest.
        overrides: the `--set` texts that are in the spec already, for the record.
        resume: "auto" goes on from the newest sound checkpoint, or starts where there is none.
        stop_after_steps, max_seconds: end the run early, after that many steps of it in all, or seconds in
            this process once it trains, validation included. The schedule does not change.
        search: folders to look for the tokenizer in.
        cache: where tokenized text is kept.
        device: a torch device; None takes the one that the target is for.
        compiled: use torch.compile and CUDA graphs on a GPU.
        lock: the measured kernels; the run keeps it, and a resumed one goes on with its own.
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


def train(options: TrainOptions, say: Say, world: World | None = None) -> TrainResult:
    """Trains, and returns when the run is complete or ended early.

    In a `world` of several processes all call it with the same options; rank 0 writes the run directory, which
    all of them must see, and speaks. The result is that of one process but for the rounding of sums.

    Raises RunDirectoryError, BatchError (exit 2) for what does not fit; EnvironmentFailure
    (3); RunFailure (4) when the loss is not finite, memory or disk is full, or the processes differ;
    IntegrityError (5); Preempted (75) and Interrupted (130) after a checkpoint; PeerLost (76) when another
    process ended; DataError for the data.
    """
    spec = options.spec
    world, ready = _fitting(options, world or World.alone())
    leads = world.rank == 0
    say = say if leads else _nothing
    directory = world.first(
        lambda: options.run or (newest_run(spec.name) if options.resume else None) or default_run(spec.name)
    )
    with ExitStack() as stack:
        if leads:
            if not options.resume:
                require_free(directory)  # before the lock: it must leave no file where there is something else
            stack.enter_context(locked(directory))
        data = lasting(options.data)
        run = Run(directory, spec, options.target, data, options.overrides, options.lock)
        if started := world.first(lambda: options.resume is not None and is_run(directory)):
            begun = Run.open(directory)
            begun.require_same(spec, options.target)
            run = begun.with_data(data)
        elif leads:
            require_free(directory)
        say(f"run: {directory}")
        trainer, validation, digests = _prepare(run, options, world, ready, stack)
        if started:
            _resume(begun, run, trainer, say)
        elif leads:  # only now that all fits: what failed before can be tried again in the same place
            Run.create(directory, spec, options.target, data, options.overrides, options.lock, ready.files, digests)
        limits = Limits(options.stop_after_steps, options.max_seconds)
        save = partial(checkpoint.save, run.checkpoints)
        if not leads:
            return Loop(run, save, trainer, validation, Silence(), Silence(), say, limits).run()
        log = RunLog(run.log)
        stack.callback(log.close)
        progress = stack.enter_context(open_progress(say))
        return Loop(run, save, trainer, validation, log, progress, say, limits).run()


def _nothing(line: str) -> None: ...


def _fitting(options: TrainOptions, world: World) -> tuple[World, Ready]:
    """The world on its device, and what reads the data, found to be there and to fit before anything is written."""
    device = torch.device(options.device or device_of(TARGETS[options.target]))
    if device.type == "cuda" and not torch.cuda.is_available():
        message = f"target {options.target} needs an NVIDIA GPU, and torch finds none"
        raise EnvironmentFailure(message, "train another target of the spec")
    ready = source_of(options.spec).ready(options.spec, options.search)
    return world.on(device), ready


def _prepare(
    run: Run, options: TrainOptions, world: World, ready: Ready, stack: ExitStack
) -> tuple[Trainer, Validates, DataDigests]:
    spec, device = run.spec, world.device
    torch.manual_seed(spec.train.seed)
    with world.in_turn("prepare"):  # one writes the generated code, starts to compile its kernels, and tokenizes
        loaded = instantiate(spec, run.target, run.generated, lock=run.lock)
        if device.type == "cuda" and world.rank == 0:
            compile_ahead(loaded.directory)
        opened = ready.open(run.data, options.cache, stack)
    digests = opened.digests
    run.require_data(digests)
    world.require_same("part of the run", {"spec": run.spec_digest, "data": [digests.train, digests.val]})
    initialize(loaded, spec.train.seed)
    supply, params = opened.supply(loaded, world, stack), loaded.programs.params
    takes = tuple(name for name, _ in next(one for one in loaded.programs.programs if one.name == "train").inputs)
    if takes != supply.feed.names:
        raise TypeError(f"the program train takes {takes}, and {spec.train.data.kind} gives {supply.feed.names}")
    schemes = allocation(spec.quant, params) if spec.train.qat is not None else None
    loaded.model.to(device)
    trainer = Trainer(
        loaded.model,
        params,
        spec.train,
        supply.loader,
        spec.model.window,
        device,
        options.compiled and device.type == "cuda",
        run.spec_digest,
        world,
        supply.feed,
        schemes,
        loaded.programs.phases,
        _inputs(run, loaded, opened, schemes, world) if schemes is not None else None,
    )
    return trainer, supply.validation, digests


def _inputs(run: Run, loaded: Loaded, opened: OpenData, schemes: Allocation, world: World) -> InputScales | None:
    """The scales of what int8 products will read, measured on the data that `specc quantize` calibrates with; None
    where the run deploys no such products."""
    assert run.spec.quant is not None
    wanted, programs = run.spec.quant.calibrate, lower(run.spec, run.target)
    sources = integer_products(programs, schemes)
    if not sources:
        return None
    rows = partial(opened.calibration, wanted.sequences, wanted.batch)
    leaders = {source.weight: source.leader for source in sources}
    return InputScales(loaded.model, leaders, partial(input_scales, programs, sources, schemes, rows), world)


def _resume(begun: Run, run: Run, trainer: Trainer, say: Say) -> None:
    """Goes on with a run as it was `begun`, but for where its data is."""
    elsewhere = run.data != lasting(begun.data)

    def newest() -> Path | None:
        sweep(run.checkpoints)
        return checkpoint.latest(run.checkpoints, say)

    path = trainer.world.first(newest)
    if path is None:
        if elsewhere:  # nothing tells whether it is the same
            message = f"{run.directory} is another run: the data: {begun.data} there, {run.data} now"
            raise RunDirectoryError(message, "it has no checkpoint yet: start a new run")
        return
    trainer.restore(checkpoint.load(path))
    if elsewhere:
        say(f"the data of the run is at {run.data} now")
        if trainer.world.rank == 0:
            run.record()
    say(f"resuming after step {trainer.step} from {path}")
    threads = checkpoint.read_state(path).threads
    if threads != torch.get_num_threads():
        now = torch.get_num_threads()
        say(f"the run used {threads} threads and now has {now}: it goes on, but not bit for bit the same")
