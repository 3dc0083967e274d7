"""Measures the whole training step, by the real trainer on drill data of the spec's kind: the spec itself beside the
same spec with `fuse: []`."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from specc.compiler import pipeline
from specc.compiler.plan.lock import Lock
from specc.compiler.programs.cost import flops_per_token
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.profile import Profile, profile
from specc.runtime.bench.timing import Measured
from specc.runtime.distributed.world import World
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.train.sources.source import source_of
from specc.runtime.train.trainable_model import TrainableModel
from specc.runtime.train.trainer import Trainer

FUSED, UNFUSED = "fused", "fuse: []"
WARM_UP = 4  # steps: the first compiles, and the GPU's clocks settle in the rest
ROUNDS = 5  # the number of groups in which the steps of a build are timed
PROFILED = 2  # steps
BATCHES = 8  # created before the clock starts, and used in turn


@dataclass(frozen=True, slots=True)
class Build:
    """One build of the model in training.

    Attributes:
        step: the time of one step.
        steps: the number of timed steps.
        tokens: the mean number of tokens per step, without pads.
        flops: the operations of the model per step.
        start: seconds from the spec to the end of the warm-up.
        compiling: the part of `start` in excess of normal step times, in seconds.
        memory: the peak memory of the build in bytes. None on the CPU.
        loss: the last loss, in nats.
        profile: the profile of a step. None on the CPU.
    """

    step: Measured
    steps: int
    tokens: int
    flops: int
    start: float
    compiling: float
    memory: int | None
    loss: float
    profile: Profile | None

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.step.ms

    @property
    def flops_per_second(self) -> float:
        """The model's operations per second: three times those of its forward pass, without recomputation by the
        kernels."""
        return 1e3 * self.flops / self.step.ms


@dataclass
class _Run:
    """A warm trainer. `samples` are ms per step, one for each group of steps. `given` is the number of tokens in all
    steps."""

    loaded: Loaded
    trainer: Trainer
    start: float
    warm: list[float]
    memory: int | None
    loss: float
    samples: list[float]
    given: int = 0

    def time(self, steps: int) -> None:
        """Times a group of steps together."""
        wait(self.trainer)
        _, given = self.trainer.feed.counted()
        before = time.perf_counter()
        known = [step for _ in range(steps) for step in self.trainer.advance()]
        known += self.trainer.settle()
        wait(self.trainer)
        self.samples.append(1e3 * (time.perf_counter() - before) / steps)
        self.loss = known[-1].loss
        self.given += self.trainer.feed.counted()[1] - given


def wait(trainer: Trainer) -> None:
    """Waits until the device has finished all of its work."""
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def measure(
    spec: Spec,
    target: str,
    lock: Lock,
    device: torch.device,
    steps: int,
    generated: frozenset[str],
    folder: Path,
    say: Callable[[str], None],
    unfused: bool = True,
) -> dict[str, Build]:
    """Measures both builds, at least `steps` steps of each. They run one after the other, because together they might
    not fit in memory.

    A spec without fusion points is its own `fuse: []`, which is then the only build.

    Args:
        spec: the spec.
        target: the target to run.
        lock: the measured kernels.
        device: the device to train on.
        steps: the steps to time.
        generated: the names of the fused build's own kernels.
        folder: the folder for generated code.
        say: reports progress.
        unfused: whether to measure the `fuse: []` build of a spec with fusion points too.

    Returns:
        The builds, by name.

    Raises:
        RunFailure: if a loss is not finite.
    """
    window = spec.model.window
    flops = 3 * flops_per_token(pipeline.lower(spec, target), window) * spec.train.rows(window) * window
    each = -(-steps // ROUNDS)
    found = {}
    names = ((FUSED, True), (UNFUSED, False)) if spec.fuse else ((UNFUSED, False),)
    for name, fuse in names if unfused else names[:1]:
        say(f"step, {name}: builds and compiles")
        torch.compiler.reset()
        with cold_caches(device), ExitStack() as stack:
            run = _start(spec, target, lock, device, folder / ("step_fused" if fuse else "step_plain"), fuse, stack)
            say(f"step, {name}: trains")
            for _ in range(-(-steps // each)):
                run.time(each)
            found[name] = _finished(run, each, flops, generated if fuse else frozenset())
            say(f"  {found[name].step.ms:.4g} ms a step, {found[name].tokens_per_second:,.0f} tokens/s")
        del run
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def cold_caches(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context manager with empty compile caches, as in a first run on a machine: no kernel that Inductor or
    Triton compiled before."""
    if device.type != "cuda":
        return nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def _start(
    spec: Spec, target: str, lock: Lock, device: torch.device, folder: Path, fuse: bool, stack: ExitStack
) -> _Run:
    """Builds one trainer and runs its warm-up steps."""
    gpu = device.type == "cuda"
    before = 0
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    torch.manual_seed(spec.train.seed)
    loaded = instantiate(spec, target, folder, fuse, lock)
    initialize(loaded, spec.train.seed)
    # without `lengths`: full windows, as at the end of the run
    train, window = spec.train.model_copy(update={"lengths": None}), spec.model.window
    data = source_of(spec).drill(spec, loaded, BATCHES, stack)
    model = TrainableModel(loaded.model, loaded.programs.params, window, "bench")
    trainer = Trainer(model, train, data, World.alone().on(device), gpu)
    run = _Run(loaded, trainer, 0.0, [], None, 0.0, [])
    for _ in range(WARM_UP):
        run.time(1)
    run.warm, run.samples, run.given = run.samples, [], 0
    run.start = time.perf_counter() - began
    run.memory = torch.cuda.max_memory_allocated() - before if gpu else None
    return run


def _finished(run: _Run, each: int, flops: int, generated: frozenset[str]) -> Build:
    trainer, steps = run.trainer, each * len(run.samples)
    half = len(run.samples) // 2
    usual = median(run.samples)
    seen = None
    if trainer.device.type == "cuda":
        seen = profile(trainer.advance, PROFILED, generated)
        trainer.settle()
    return Build(
        Measured.of(run.samples[: max(half, 1)], run.samples[half:]),
        steps,
        round(run.given / steps),
        flops,
        run.start,
        sum(max(0.0, ms - usual) for ms in run.warm) / 1e3,
        run.memory,
        run.loss,
        seen,
    )
