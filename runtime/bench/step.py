"""Measures the training step of a spec, and the training step of the same spec with `fuse: []`.

The trainer of `specc train` runs the steps on random data.
"""

import gc
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median

import torch

from specc.compiler import pipeline
from specc.compiler.changing_values import last
from specc.compiler.programs.cost import flops_per_token
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.profile import Profile, profile
from specc.runtime.bench.timing import Measured, wait
from specc.runtime.distributed.world import World
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.train.determinism import deterministic_algorithms
from specc.runtime.train.sources.source import source_of
from specc.runtime.train.trainer import TrainableModel, Trainer

FUSED, UNFUSED = "fused", "fuse: []"
WARM_UP = 4  # the first warm-up step compiles; the clock rate of the GPU settles during the other steps
ROUNDS = 5  # the number of groups of steps that are timed separately
PROFILED = 2  # steps
BATCHES = 8  # the number of batches that are created before the clock starts; the steps use them in turn


@dataclass(frozen=True, slots=True)
class Build:
    """Training measurements of one build: fused or unfused.

    Attributes:
        step: the time of one step.
        steps: the number of timed steps.
        tokens: the mean number of tokens per step, without padding.
        flops: the number of arithmetic operations per step, estimated as three times the operations of the forward
            pass.
        start_seconds: the seconds from the start of code generation to the end of the warm-up.
        compile_seconds: the seconds by which the warm-up steps exceeded normal steps, because code was compiled.
        peak_bytes: the peak memory of the build. None on the CPU.
        loss: the last loss, in nats.
        profile: the profile of a step. None on the CPU.
    """

    step: Measured
    steps: int
    tokens: int
    flops: int
    start_seconds: float
    compile_seconds: float
    peak_bytes: int | None
    loss: float
    profile: Profile | None

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.step.ms

    @property
    def model_flops_per_second(self) -> float:
        return 1e3 * self.flops / self.step.ms


def measure(setup: Setup, steps: int, generated: frozenset[str], unfused: bool = True) -> dict[str, Build]:
    """Measures at least `steps` training steps of the fused build, and then of the unfused build.

    A spec without fusion points has only the unfused build.

    Args:
        setup: the setup of the benchmark.
        steps: the minimum number of steps to time.
        generated: the names of the generated kernels of the fused build.
        unfused: whether to also measure the unfused build of a spec with fusion points.

    Returns:
        The measurements of each build, by the name of the build.

    Raises:
        RunFailure: if a loss is not finite.
    """
    builds = {}
    names = ((FUSED, True), (UNFUSED, False)) if setup.spec.fuse else ((UNFUSED, False),)
    for name, fuse in names if unfused else names[:1]:
        setup.say(f"step, {name}: builds and compiles")
        torch.compiler.reset()
        with cold_caches(setup.device), ExitStack() as stack:
            build = builds[name] = _measure(setup, fuse, steps, generated if fuse else frozenset(), stack)
            setup.say(f"  {build.step.ms:.4g} ms per step, {build.tokens_per_second:,.0f} tokens/s")
        release(setup.device)
    return builds


def release(device: torch.device) -> None:
    """Runs the garbage collector, and frees the GPU memory that Torch caches."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cold_caches(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context manager in which the compile caches of Inductor and Triton are empty, as on a new machine."""
    if device.type != "cuda":
        return nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def _measure(setup: Setup, fuse: bool, steps: int, generated: frozenset[str], stack: ExitStack) -> Build:
    spec, device, gpu = setup.spec, setup.device, setup.device.type == "cuda"
    window = spec.model.window
    _, length = spec.train.micro_batch_rows(window)
    before = 0
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    folder = setup.folder / ("step_fused" if fuse else "step_plain")
    loaded = instantiate(spec, setup.target, folder, fuse, setup.lock)
    trainer = random_trainer(loaded, device, stack)
    warm = [advance(trainer, 1)[0] for _ in range(WARM_UP)]
    start = time.perf_counter() - began
    memory = torch.cuda.max_memory_allocated() - before if gpu else None
    setup.say("  trains")
    each = -(-steps // ROUNDS)
    samples, losses, tokens = zip(*(advance(trainer, each) for _ in range(-(-steps // each))), strict=True)
    half, count, usual = len(samples) // 2, each * len(samples), median(samples)
    seen = None
    if gpu:
        seen = profile(trainer.advance, PROFILED, generated)
        trainer.settle()
    return Build(
        step=Measured.of(samples[: max(half, 1)], samples[half:]),
        steps=count,
        tokens=round(sum(tokens) / count),
        flops=3 * flops_per_token(pipeline.lower(spec, setup.target), length) * spec.train.rows(window) * window,
        start_seconds=start,
        compile_seconds=sum(max(0.0, ms - usual) for ms in warm) / 1e3,
        peak_bytes=memory,
        loss=losses[-1],
        profile=seen,
    )


def random_trainer(loaded: Loaded, device: torch.device, stack: ExitStack) -> Trainer:
    """Returns a trainer that trains the loaded model with initial weights on random data.

    `stack` closes the resources of the trainer. Schedules of the spec are ignored: every row has its final length, and
    every step has the final batch size. On a GPU, the trainer compiles the step.
    """
    spec = loaded.spec
    stack.enter_context(deterministic_algorithms(spec.train.deterministic, device))
    torch.manual_seed(spec.train.seed)
    initialize(loaded, spec.train.seed)
    feed = source_of(spec).drill(spec, loaded, BATCHES, stack)
    programs = loaded.programs
    derived = programs.derived_weights
    model = TrainableModel(loaded.model, programs.params, spec.model.window, "bench", derived=derived)
    ends = {name: last(getattr(spec.train, name)) for name in ("context", "batch", "tokens_per_step")}
    train = spec.train.model_copy(update=ends)
    return Trainer(model, train, feed, World.alone().on(device), device.type == "cuda")


def advance(trainer: Trainer, steps: int) -> tuple[float, float, int]:
    """Trains `steps` steps. Returns the time per step in ms, the loss of the last step in nats, and the total number of
    tokens without padding.
    """
    wait(trainer.device)
    _, before = trainer.feed.counted()
    began = time.perf_counter()
    finished = [step for _ in range(steps) for step in trainer.advance()]
    finished += trainer.settle()
    wait(trainer.device)
    ms = 1e3 * (time.perf_counter() - began) / steps
    return ms, finished[-1].loss, trainer.feed.counted()[1] - before
