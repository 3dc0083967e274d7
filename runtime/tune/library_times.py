"""Measures work that has no tile sizes to search: matrix products of libraries, and a whole training step."""

import tempfile
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path

import torch

from specc.compiler.build import plan_loaded
from specc.compiler.plan.lock import Lock, Machine, StepTiming, Timing
from specc.compiler.plan.plan import Plan
from specc.compiler.report.step import LIBRARY, POINTWISE, REST, Step, StepRow, step_of
from specc.compiler.spec.spec import Spec
from specc.runtime.bench import step as bench_step
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.plain import bare_product, plain_site
from specc.runtime.bench.profile import Profile, generated_names
from specc.runtime.bench.timing import alternate
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import instantiate
from specc.runtime.tune.merge import merged
from specc.runtime.verify.judge import inputs_of
from specc.runtime.verify.random_inputs import sizes_of

STEPS = 20
REST_KERNELS = ("optimizer", "communication", "copy", "other")  # the classes of a profile
Say = Callable[[str], None]


def measure_rest(
    spec: Spec, target: str, path: Path, machine: Machine, only: str, device: torch.device, say: Say
) -> None:
    """Measures matrix products that a library computes, and writes their times into the lock file.

    If `only` is empty, the function also measures a whole training step.

    Args:
        spec: the spec, which determines the sizes of the measured products.
        target: the name of the target that matches the device.
        path: the path of the lock file, which contains the measured kernels and receives the times.
        machine: the description of this machine for the lock file.
        only: a part of a node path. Only products of nodes whose path contains this text are measured.
        device: the device on which to measure.
        say: the function that receives messages about the progress.

    Raises:
        RunFailure: if memory is too small, or the loss of the training step is not finite.
    """
    lock = merged(path, lambda lock: lock)
    plan = plan_loaded(spec, None, (target,), lock).plans[target]
    step = step_of(spec, plan)
    try:
        for row in library_rows(step, only):
            timing = time_row(row, spec, device)
            say(f"{row.node}: {timing.ms:.4f} ms by the library")
            assert row.site is not None
            lock = merged(path, methodcaller("with_measured", target, machine, timings={row.site.key: timing}))
        if not only:
            timed = time_step(spec, plan, step, lock, device, say)
            say(f"step: {timed.ms:.1f} ms, {timed.memory / 1e9:.1f} GB")
            merged(path, methodcaller("with_measured", target, machine, step=timed))
    except torch.OutOfMemoryError as error:
        hint = "stop other programs on the GPU, or lower train.micro_batch in the spec"
        raise RunFailure("out of GPU memory", hint) from error


def library_rows(step: Step, only: str = "") -> tuple[StepRow, ...]:
    """Returns one row per shape of the matrix products that a library computes in a training step.

    `only` is a part of a node path. Products of nodes whose path does not contain this text are omitted.
    """
    return tuple(row for row in step.rows if row.work == LIBRARY and row.site is not None and only in row.node)


def time_row(row: StepRow, spec: Spec, device: torch.device) -> Timing:
    """Measures the time of one matrix product on random inputs, with the sizes of the spec."""
    assert row.site is not None
    sizes = sizes_of(spec)
    inputs = inputs_of(row.site, sizes, device)
    library = bare_product(row.site) or plain_site(row.site)
    with torch.no_grad():
        measured = alternate({"library": lambda: library(*inputs)}, device, row.moved)["library"]
    return Timing(node=row.node, rows=sizes["B"] * sizes["T"], ms=float(f"{measured.ms:.4g}"))


def time_step(spec: Spec, plan: Plan, step: Step, lock: Lock, device: torch.device, say: Say) -> StepTiming:
    """Measures training steps with the kernels in `lock`.

    Args:
        spec: the spec.
        plan: the plan of the spec on one target.
        step: the estimate of the step, which determines the key and the number of tokens of the measurement.
        lock: the kernels that `specc tune` measured as the fastest.
        device: the GPU on which to train.
        say: the function that receives messages about the progress.

    Returns:
        The time of a step in ms, the peak memory in bytes, and the time in ms of each class of work that belongs to no
        node of the plan, such as the optimizer.

    Raises:
        RunFailure: if the device is not a GPU, or a loss is not finite.
    """
    with tempfile.TemporaryDirectory(prefix="specc-tune-step-") as name:
        folder = Path(name)
        names = generated_names(plan, instantiate(spec, plan.target.name, folder / "names", lock=lock).directory)
        setup = Setup(spec, plan.target.name, device, folder, say, lock)
        builds = bench_step.measure(setup, STEPS, names, unfused=False)
        (build,) = builds.values()
    if build.peak_bytes is None or build.profile is None:
        raise RunFailure("a training step is measured only on a GPU", "select a GPU target with --target")
    return StepTiming(
        key=step.key,
        tokens=step.tokens,
        ms=float(f"{build.step.ms:.4g}"),
        memory=build.peak_bytes,
        classes=classes_of(build.profile),
    )


def classes_of(profile: Profile) -> dict[str, float]:
    """Returns the time of each class of work that belongs to no node of the plan, in ms per step.

    One class contains all time that no other class contains, such as idle time.
    """
    known = {kind: total["ms"] for kind, total in profile.classes.items()}
    rest = profile.idle_ms + sum(known.get(kind, 0.0) for kind in REST_KERNELS)
    times = {POINTWISE: known.get("pointwise", 0.0), REST: rest}
    return {name: float(f"{ms:.4g}") for name, ms in times.items() if ms > 0}
