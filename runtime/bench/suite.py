"""Runs all parts of a benchmark in order: ceilings, kernels, groups, the step, and the parts for models of pairs."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from specc.compiler.build import Built, compile_loaded
from specc.compiler.plan.lock import Lock
from specc.compiler.spec.spec import Spec
from specc.runtime.bench import ceilings, decode, step, table
from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.compiling import Compiler
from specc.runtime.bench.decode import Decoding
from specc.runtime.bench.environment import Environment, device_for, environment
from specc.runtime.bench.groups import group_rows, require_place
from specc.runtime.bench.kernels import Row, kernel_rows
from specc.runtime.bench.products import ProductRow, product_rows
from specc.runtime.bench.profile import generated_names
from specc.runtime.bench.step import Build
from specc.runtime.bench.table import Table
from specc.runtime.bench.variants import AGAINST, left_out
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import Loaded, instantiate
from specc.runtime.verify.random_inputs import DTYPES, sizes_of

PARTS = ("kernels", "groups", "step", "table", "decode", "int8")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of a benchmark.

    Attributes:
        spec: the spec.
        lock: its measured kernels.
        target: the target to measure.
        parts: the entries of PARTS to run. Empty for all that the spec has.
        steps: the number of training steps.
        command: the command that a report states.
        at: of kernels, groups and int8, measures only those whose path contains this text.
        weights: a run or an artifact to decode with.
    """

    spec: Spec
    lock: Lock
    target: str
    parts: tuple[str, ...] = ()
    steps: int = 10
    command: str = ""
    at: str = ""
    weights: Path | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All measurements of one benchmark. Parts that were not requested are empty.

    `left_out` are the parts that this machine does not support, with reasons. `nvcc` is the total time in seconds of
    compiling CUDA C++, all files in parallel.
    """

    options: BenchOptions
    title: str
    environment: Environment
    sizes: Mapping[str, int]
    ceilings: Ceilings
    kernels: tuple[Row, ...]
    groups: tuple[Row, ...]
    builds: Mapping[str, Build]
    table: Table | None
    decoding: Decoding | None
    products: tuple[ProductRow, ...]
    left_out: Mapping[str, str]
    nvcc: float
    seconds: float


def parts_of(options: BenchOptions, built: Built) -> tuple[str, ...]:
    """Returns the parts to run, in order. Raises RunFailure if a requested part does not apply to the spec."""
    pairs, integers = options.spec.model.reads == "lines", options.target in built.deployed
    refused = {
        "table": None if pairs else "validates by decoding lines, and this model reads one stream of tokens",
        "decode": None if pairs else "decodes lines, and this model reads one stream of tokens",
        "int8": None if integers else "times products in int8, and this spec stores none",
    }
    for part in options.parts:
        if reason := refused.get(part):
            raise RunFailure(f"{options.spec.name}: {part} {reason}", "name other parts with --only")
    return tuple(part for part in PARTS if part in options.parts or not (options.parts or refused.get(part)))


def follow(options: BenchOptions, world: World) -> None:
    """Runs the part of all processes except the first: their share of the table, if it is measured. Raises as
    `bench`."""
    built = compile_loaded(options.spec, None, (options.target,), options.lock)
    if "table" in parts_of(options, built):
        device = device_for(options.target)
        table.measure(options.spec, options.target, options.lock, options.steps, world.on(device), lambda line: None)


def bench(options: BenchOptions, say: Callable[[str], None], world: World | None = None) -> Report:
    """Runs the parts. Reports each figure as soon as it is known, so that an interrupted run has reported its results
    so far. In a `world` of several processes, the others call `follow`.

    Raises:
        EnvironmentFailure: if this machine cannot run the target.
        RunFailure: if a part does not apply to the spec, a kernel is wrong, a loss is not finite, memory is too small,
            or no path contains `options.at`.
    """
    began = time.perf_counter()
    spec, target, at = options.spec, options.target, options.at
    built = compile_loaded(spec, None, (target,), options.lock)
    plan, parts = built.plans[target], parts_of(options, built)
    device = device_for(target)
    world = (world or World.alone()).on(device)
    seconds = 0.0
    kernels: tuple[Row, ...] = ()
    groups: tuple[Row, ...] = ()
    builds: Mapping[str, Build] = {}
    products: tuple[ProductRow, ...] = ()
    rates: Table | None = None
    decoding: Decoding | None = None
    with tempfile.TemporaryDirectory(prefix="specc-bench-") as name:
        require_place(plan, options.parts, options.at)
        folder = Path(name)
        try:
            say("ceilings")
            found = ceilings.measure(device, DTYPES[plan.target.dtype])
            if {"kernels", "groups", "step"} & set(parts):
                fused = instantiate(spec, target, folder / "fused", lock=options.lock)
                with Compiler(fused.directory) as compiler:
                    if "kernels" in parts:
                        rows = kernel_rows(spec, plan, source_of(fused), device, compiler.ready, at, say)
                        kernels = _told(rows, say)
                    if "groups" in parts:
                        plain = instantiate(spec, target, folder / "plain", fuse=False)
                        compiler.all()
                        rows = group_rows(spec, plan, source_of(fused), source_of(plain), device, at, say)
                        groups = _told(rows, say)
                    if "step" in parts:
                        compiler.all()
                        names = generated_names(plan, fused.directory)
                        builds = step.measure(spec, target, options.lock, device, options.steps, names, folder, say)
                seconds += compiler.seconds
            if "int8" in parts:
                deployed = instantiate(spec, target, folder / "deployed", lock=options.lock, deployed=True)
                with Compiler(deployed.directory) as compiler:
                    made = built.deployed[target]
                    products = tuple(product_rows(made, source_of(deployed), device, compiler.ready, at, say))
                seconds += compiler.seconds
            if "table" in parts:
                rates = table.measure(spec, target, options.lock, options.steps, world, say)
            if "decode" in parts:
                decoding = decode.measure(spec, target, options.lock, device, options.weights, folder / "decode", say)
        except torch.OutOfMemoryError as error:
            hint = "lower train.micro_batch: --set train.micro_batch=N"
            raise RunFailure("out of GPU memory", hint if spec.train.batch is None else "lower the batch") from error
    if at and not (kernels or groups or builds or products or rates or decoding):
        plans = (plan, *built.deployed.values())
        places = sorted({choice.site.label for one in plans for choice in one.choices})
        raise RunFailure(f"no kernel and no group is at {at}", f"there are: {', '.join(places)}")
    left = dict(left_out(device)) if {"kernels", "groups"} & set(parts) else {}
    if "step" in parts and device.type == "cpu":
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
        rates,
        decoding,
        products,
        left,
        seconds,
        time.perf_counter() - began,
    )


def _told(rows: Iterable[Row], say: Callable[[str], None]) -> tuple[Row, ...]:
    """Collects the rows, reporting each as soon as it is measured."""
    found = []
    for row in rows:
        ratios = ((row.ratio(name), name) for name in AGAINST)
        words = [f"{ratio:.3f} of {name}" for ratio, name in ratios if ratio is not None]
        say(f"  {row.name}: {', '.join((f'{row.own.ms:.4g} ms', *words))}")
        found.append(row)
    return tuple(found)


def source_of(loaded: Loaded) -> ModuleType:
    """Returns the generated model.py module of a model."""
    return sys.modules[type(loaded.model).__module__]
