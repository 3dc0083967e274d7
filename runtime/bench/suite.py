"""All parts of a bench in order: ceilings, kernels, groups, the step."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from specc.compiler.build import compile_loaded
from specc.compiler.lock import Lock
from specc.compiler.plan import Choice, Plan
from specc.compiler.spec import Spec
from specc.runtime.bench import ceilings, step
from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.environment import Environment, device_for, environment
from specc.runtime.bench.groups import group_rows, require_place
from specc.runtime.bench.kernels import Row, kernel_rows
from specc.runtime.bench.operands import DTYPES, sizes_of
from specc.runtime.bench.profile import generated_names
from specc.runtime.bench.step import Build
from specc.runtime.bench.variants import AGAINST, left_out
from specc.runtime.errors import RunFailure
from specc.runtime.load import Loaded, instantiate
from specc.runtime.native import compile_only

PARTS = ("kernels", "groups", "step")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure: a spec with its lock, on one of its targets; which of PARTS, of kernels and groups those whose
    path contains `at`, and how many steps of training. `command` is what a report says it came from."""

    spec: Spec
    lock: Lock
    target: str
    parts: tuple[str, ...] = PARTS
    steps: int = 10
    command: str = ""
    at: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run measured. A part that was not asked for is empty; `left_out` says what this machine does not
    have and why; `nvcc` are the seconds that compiling CUDA C++ took, all files at once."""

    options: BenchOptions
    title: str
    environment: Environment
    sizes: Mapping[str, int]
    ceilings: Ceilings
    kernels: tuple[Row, ...]
    groups: tuple[Row, ...]
    builds: Mapping[str, Build]
    left_out: Mapping[str, str]
    nvcc: float
    seconds: float


def bench(options: BenchOptions, say: Callable[[str], None]) -> Report:
    """Runs the parts; says each figure as it is known, so that a run that is cut off has told what it found.

    Raises EnvironmentFailure where this machine cannot run the target, RunFailure for a kernel that is wrong, a loss
    that is not finite, too little memory, or where no path contains what was asked for."""
    began = time.perf_counter()
    spec, target = options.spec, options.target
    device = device_for(target)
    plan = compile_loaded(spec, None, (target,), options.lock).plans[target]
    with tempfile.TemporaryDirectory(prefix="specc-bench-") as name:
        require_place(plan, options.parts, options.at)
        folder = Path(name)
        fused = instantiate(spec, target, folder / "fused", lock=options.lock)
        with Compiler(plan, fused.directory) as compiler:
            try:
                say("ceilings")
                found = ceilings.measure(device, DTYPES[plan.target.dtype])
                kernels: tuple[Row, ...] = ()
                groups: tuple[Row, ...] = ()
                builds: Mapping[str, Build] = {}
                if "kernels" in options.parts:
                    rows = kernel_rows(spec, plan, source_of(fused), device, compiler.ready, options.at, say)
                    kernels = _told(rows, say)
                if "groups" in options.parts:
                    plain = instantiate(spec, target, folder / "plain", fuse=False)
                    compiler.all()
                    rows = group_rows(spec, plan, source_of(fused), source_of(plain), device, options.at, say)
                    groups = _told(rows, say)
                if "step" in options.parts:
                    compiler.all()
                    names = generated_names(plan, fused.directory)
                    builds = step.measure(spec, target, options.lock, device, options.steps, names, folder, say)
            except torch.OutOfMemoryError as error:
                raise RunFailure("out of GPU memory", "lower train.micro_batch: --set train.micro_batch=N") from error
        if options.at and not (kernels or groups or builds):
            places = sorted({choice.site.label for choice in plan.choices})
            raise RunFailure(f"no kernel and no group is at {options.at}", f"there are: {', '.join(places)}")
        left = dict(left_out(device))
        if "step" in options.parts and device.type == "cpu":
            left["profile"] = "the CPU runs no kernels that a profiler could put in classes: no profile of the step"
        return Report(
            options,
            plan.title,
            environment(device),
            sizes_of(spec),
            found,
            kernels,
            groups,
            builds,
            left,
            compiler.seconds,
            time.perf_counter() - began,
        )


def _told(rows: Iterable[Row], say: Callable[[str], None]) -> tuple[Row, ...]:
    """The rows, each told when it is there."""
    found = []
    for row in rows:
        ratios = ((row.ratio(name), name) for name in AGAINST)
        words = [f"{ratio:.3f} of {name}" for ratio, name in ratios if ratio is not None]
        say(f"  {row.name}: {', '.join((f'{row.own.ms:.4g} ms', *words))}")
        found.append(row)
    return tuple(found)


def source_of(loaded: Loaded) -> ModuleType:
    """The generated model.py behind a model."""
    return sys.modules[type(loaded.model).__module__]


class Compiler:
    """Compiles all CUDA C++ of a plan in the background, so that nvcc and torch.compile work side by side."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._began, self.seconds = time.perf_counter(), 0.0
        names = {name for choice in plan.choices for name in choice.rendered.files if name.endswith(".cu")}
        self._waiting: dict[str, Future[None]] = {
            name: self._pool.submit(self._compile, directory / name) for name in sorted(names)
        }

    def _compile(self, source: Path) -> None:
        compile_only(source)
        self.seconds = max(self.seconds, time.perf_counter() - self._began)

    def ready(self, choice: Choice) -> None:
        """Waits for the files of one kernel. Raises what `compile_only` raises."""
        for name in choice.rendered.files:
            if name in self._waiting:
                self._waiting[name].result()

    def all(self) -> None:
        """Waits for every file."""
        for future in self._waiting.values():
            future.result()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
