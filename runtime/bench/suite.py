"""Runs the parts of a benchmark in order."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import torch

from specc.compiler.build import Built, compiled
from specc.compiler.plan.lock import Lock, Machine
from specc.compiler.spec.spec import Spec
from specc.runtime.bench import ceilings, decode_lines, decode_text, optimizer, step, table
from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.compiling import Compiler
from specc.runtime.bench.decode_lines import Decoding
from specc.runtime.bench.decode_text import TextDecoding
from specc.runtime.bench.environment import Setup, device_for, machine_of
from specc.runtime.bench.groups import group_rows, require_place
from specc.runtime.bench.kernels import Row, kernel_rows
from specc.runtime.bench.optimizer import Updates
from specc.runtime.bench.products import ProductRow, product_rows
from specc.runtime.bench.profile import generated_names
from specc.runtime.bench.step import Build
from specc.runtime.bench.table import Table
from specc.runtime.bench.variants import AGAINST, left_out
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import Loaded, instantiate
from specc.runtime.verify.random_inputs import DTYPES, sizes_of

PARTS = ("kernels", "groups", "step", "optimizer", "table", "decode", "int8")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of a benchmark.

    Attributes:
        spec: the spec.
        lock: the kernels that were fastest in measurements.
        target: the target to measure.
        parts: the entries of PARTS to run; if empty, all parts that apply to the spec.
        steps: the number of training steps.
        command: the command line of the benchmark, which the report shows.
        at: only kernels, groups and int8 products whose path contains this text are measured.
        weights: a run directory or an artifact with the weights for measuring decoding. None selects initial weights.
        batches: the batch sizes of text decoding; empty for the default sizes.
        contexts: the lengths of completed texts in tokens; empty for the default lengths.
        tokens: the number of timed tokens per text; None for the default.
    """

    spec: Spec
    lock: Lock
    target: str
    parts: tuple[str, ...] = ()
    steps: int = 10
    command: str = ""
    at: str = ""
    weights: Path | None = None
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    tokens: int | None = None


@dataclass(slots=True)
class Report:
    """All measurements of one benchmark. The attributes of parts that did not run are empty or None.

    `left_out` maps each part that this machine does not support to the reason. `nvcc_seconds` is the duration of
    compiling all CUDA C++ files in parallel.
    """

    options: BenchOptions
    title: str
    machine: Machine
    ceilings: Ceilings
    kernels: tuple[Row, ...] = ()
    groups: tuple[Row, ...] = ()
    builds: Mapping[str, Build] = field(default_factory=dict)
    updates: Updates | None = None
    table: Table | None = None
    decoding: Decoding | TextDecoding | None = None
    products: tuple[ProductRow, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    nvcc_seconds: float = 0.0
    seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    @property
    def sizes(self) -> Mapping[str, int]:
        return sizes_of(self.options.spec)


def parts_of(options: BenchOptions, built: Built) -> tuple[str, ...]:
    """Returns the names of the parts to run, in order.

    `built` is the result of compiling the spec. Raises RunFailure if a requested part does not apply to the spec.
    """
    pairs, integers = options.spec.model.reads == "lines", options.target in built.deployed
    data = options.spec.train.data
    files = None if data.usual else f"needs lines that specc generates, but data of kind `{data.kind}` are in files"
    refused = {
        "table": files if pairs else "needs a model that maps lines to lines, but this is a text model",
        "decode": files,
        "int8": None if integers else "needs int8 products, but this spec has none",
    }
    for part in options.parts:
        if reason := refused.get(part):
            raise RunFailure(f"{options.spec.name}: {part} {reason}", "name other parts with --only")
    if pairs and (options.batches or options.contexts or options.tokens):
        words = "--batch, --context and --tokens are for text models, but this model maps lines to lines"
        message = f"{options.spec.name}: {words}"
        raise RunFailure(message, "set eval.batch: --set eval.batch=N")
    return tuple(part for part in PARTS if part in options.parts or not (options.parts or refused.get(part)))


def follow(options: BenchOptions, world: World) -> None:
    """Runs the only part of a benchmark that needs all processes: the training table. Rank 0 calls `bench`, and all
    other ranks call this function at the same time.

    Does nothing if the training table is not measured. Raises the errors that `bench` raises.
    """
    built = compiled(options.spec, (options.target,), options.lock)
    if "table" in parts_of(options, built):
        device = device_for(options.target)
        setup = Setup(options.spec, options.target, device, Path(), lambda line: None, options.lock)
        table.measure(setup, options.steps, world.on(device))


def bench(options: BenchOptions, say: Callable[[str], None], world: World | None = None) -> Report:
    """Runs the requested parts of a benchmark, and passes each result to `say` as soon as it is measured.

    If `world` has several processes, rank 0 calls `bench`, and all other ranks call `follow`.

    Args:
        options: the options of the benchmark.
        say: is called with each result and with messages about the progress.
        world: the processes that take part in the benchmark. None for this process alone.

    Returns:
        The measurements of all parts.

    Raises:
        EnvironmentFailure: if this machine cannot run the target.
        RunFailure: if a part does not apply to the spec, or fails.
    """
    began = time.perf_counter()
    spec, target, at = options.spec, options.target, options.at
    built = compiled(spec, (target,), options.lock)
    plan, parts = built.plans[target], parts_of(options, built)
    device = device_for(target)
    require_place(plan, options.parts, at)
    with tempfile.TemporaryDirectory(prefix="specc-bench-") as name:
        setup = Setup(spec, target, device, Path(name), say, options.lock)
        say("ceilings")
        try:
            report = Report(
                options, plan.title, machine_of(device), ceilings.measure(device, DTYPES[plan.target.dtype])
            )
            _measure(report, parts, setup, built, (world or World.alone()).on(device))
        except torch.OutOfMemoryError as error:
            hint = "lower train.micro_batch: --set train.micro_batch=N"
            raise RunFailure("out of GPU memory", hint if spec.train.batch is None else "lower train.batch") from error
    measured = (report.kernels, report.groups, report.builds, report.updates, report.products)
    others = (report.table, report.decoding)
    if at and not any((*measured, *others)):
        labels = {choice.site.label for each in (plan, *built.deployed.values()) for choice in each.choices}
        raise RunFailure(f"no kernel or group has {at} in its name", f"the names are: {', '.join(sorted(labels))}")
    if {"kernels", "groups"} & set(parts):
        report.left_out = dict(left_out(device))
    if "step" in parts and device.type == "cpu":
        reason = "no profile of the step, because the CPU has no kernels to classify"
        report.left_out = {**report.left_out, "profile": reason}
    report.seconds = time.perf_counter() - began
    return report


def _measure(report: Report, parts: Sequence[str], setup: Setup, built: Built, world: World) -> None:
    options, plan, folder = report.options, built.plans[setup.target], setup.folder
    if {"kernels", "groups", "step"} & set(parts):
        fused = instantiate(setup.spec, setup.target, folder / "fused", lock=setup.lock)
        with Compiler(fused.directory) as compiler:
            if "kernels" in parts:
                rows = kernel_rows(setup, plan, source_of(fused), compiler.ready, options.at)
                report.kernels = _reported(rows, setup.say)
            if "groups" in parts:
                plain = instantiate(setup.spec, setup.target, folder / "plain", fuse=False)
                compiler.all()
                rows = group_rows(setup, plan, source_of(fused), source_of(plain), options.at)
                report.groups = _reported(rows, setup.say)
            if "step" in parts:
                compiler.all()
                report.builds = step.measure(setup, options.steps, generated_names(plan, fused.directory))
        report.nvcc_seconds += compiler.seconds
    if "optimizer" in parts:
        report.updates = optimizer.measure(setup, report.ceilings, options.steps)
    if "int8" in parts:
        deployed = instantiate(setup.spec, setup.target, folder / "deployed", lock=setup.lock, deployed=True)
        with Compiler(deployed.directory) as compiler:
            products = product_rows(
                setup, built.deployed[setup.target], source_of(deployed), compiler.ready, options.at
            )
            report.products = tuple(products)
        report.nvcc_seconds += compiler.seconds
    if "table" in parts:
        report.table = table.measure(setup, options.steps, world)
    if "decode" in parts:
        place = replace(setup, folder=folder / "decode")
        if setup.spec.model.reads == "lines":
            report.decoding = decode_lines.measure(place, options.weights)
        else:
            sizes = options.batches, options.contexts, options.tokens
            report.decoding = decode_text.measure(place, report.ceilings, options.weights, *sizes)


def _reported(rows: Iterable[Row], say: Callable[[str], None]) -> tuple[Row, ...]:
    collected = []
    for row in rows:
        ratios = ((row.ratio(name), name) for name in AGAINST)
        words = [f"{ratio:.3f} of {name}" for ratio, name in ratios if ratio is not None]
        say(f"  {row.name}: {', '.join((f'{row.time.ms:.4g} ms', *words))}")
        collected.append(row)
    return tuple(collected)


def source_of(loaded: Loaded) -> ModuleType:
    return sys.modules[type(loaded.model).__module__]
