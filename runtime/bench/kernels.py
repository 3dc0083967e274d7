"""Measures every kernel of a plan.

The baselines of a kernel compute the same node in eager Torch, under torch.compile, and by a library.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

from specc.compiler.plan.plan import Choice, Plan
from specc.runtime.bench.ceilings import Work
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.plain import bare_product, plain_site
from specc.runtime.bench.timing import Measured, alternate
from specc.runtime.bench.variants import GENERATED, LIBRARY, baselines, failures
from specc.runtime.errors import RunFailure
from specc.runtime.verify.judge import Composed, Judge, on_domain
from specc.runtime.verify.random_inputs import Operands, sizes_of


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table of kernels and groups: the times of all implementations of a node or a group. An
    implementation is called a variant.

    Attributes:
        name: the path of the node or group.
        kernel: the name of the generated kernel or group, or "library" if the plan selects a library call for the node.
        work: the minimum work of one call.
        times: the time of each variant.
        language: the language of the kernel. None for a group.
        tile: the tile sizes of the kernel. None for a kernel without tiles, and for a group.
        accuracy: the numerical errors of the kernel or group. None if the plan selects a library call for the node.
        failed: the error message for each variant that torch.compile could not compile.
    """

    name: str
    kernel: str
    work: Work
    times: Mapping[str, Measured]
    language: str | None = None
    tile: str | None = None
    accuracy: Composed | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def time(self) -> Measured:
        """The time of the implementation that the plan selects: the generated kernel, or the library call."""
        return self.times.get(GENERATED) or self.times[LIBRARY]

    def ratio(self, variant: str) -> float | None:
        """Returns the time of the generated code divided by the time of a variant. None if either time was not
        measured.
        """
        if GENERATED not in self.times or variant not in self.times:
            return None
        return self.times[GENERATED].ms / self.times[variant].ms


def kernel_rows(
    setup: Setup, plan: Plan, module: ModuleType, ready: Callable[[Choice], object], at: str
) -> Iterator[Row]:
    """Measures every distinct kernel whose path contains `at`, and yields one row for each. Kernels that nvcc compiles
    come last.

    Args:
        setup: the setup of the benchmark.
        plan: the plan, whose kernels are measured.
        module: the module model.py that was generated for the plan.
        ready: a function that waits until the selected kernel of a node is compiled.
        at: only kernels whose path contains this text are measured.

    Raises:
        RunFailure: if a kernel returns wrong values.
    """
    seen: set[tuple[str, str]] = set()
    for choice in sorted(plan.choices, key=lambda choice: choice.kernel.language in ("cuda", "cutlass")):
        key = (choice.rendered.module, "" if choice.rendered.module else choice.site.label)
        if key in seen or at not in choice.site.label or not choice.listed:
            continue
        seen.add(key)
        setup.say(f"kernel {choice.site.label}")
        with torch.no_grad():
            yield _row(setup, plan, module, choice, ready)
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def _row(setup: Setup, plan: Plan, module: ModuleType, choice: Choice, ready: Callable[[Choice], object]) -> Row:
    site, rendered = choice.site, choice.rendered
    sizes = site.node.op.site_sizes(sizes_of(setup.spec))
    work = work_of(choice, sizes)
    values = Operands(setup.spec, setup.device, sizes=sizes).of(site.node.inputs, site.inputs)
    inputs = on_domain(site, values, values)  # type: ignore[arg-type]
    bare = bare_product(site)
    if not rendered.function:  # skipped, because the library computes the whole node
        times = alternate({LIBRARY: partial(bare or plain_site(site), *inputs)}, setup.device, work.bytes)
        return Row(site.label, "library", work, times, "torch")
    others = baselines(plain_site(site), setup.device)
    if bare is not None:
        others[LIBRARY] = bare
    calls = {name: partial(other, *inputs) for name, other in others.items()}
    failed = failures(calls)
    ready(choice)
    generated = vars(module)[plan.called(choice)]
    accuracy = _accuracy(choice, inputs, generated)
    copies = [value.clone() for value in inputs]  # a kernel may overwrite its inputs
    calls = {GENERATED: partial(generated, *copies)} | {n: call for n, call in calls.items() if n not in failed}
    times = alternate(calls, setup.device, work.bytes)
    tile = rendered.tile or None
    return Row(site.label, rendered.module, work, times, choice.kernel.language, tile, accuracy, failed)


def work_of(choice: Choice, sizes: Mapping[str, int]) -> Work:
    """Returns the minimum work of the node that `choice` computes. The bytes exclude intermediate values.

    `sizes` has the values of symbolic dimensions.
    """
    node, inputs = choice.site.node, choice.site.inputs
    flops = node.op.flops(inputs[: node.op.arity] if node.epilogue else inputs, node.types, sizes)
    moved, written = node.op.moved(inputs, node.types, sizes), sum(type.bytes(sizes) for type in node.types)
    return Work(flops, moved, min(written, moved))


def _accuracy(choice: Choice, inputs: list[Any], generated: Callable[..., Any]) -> Composed:
    judge = Judge.of(choice.site, inputs, sample=True)
    errors = judge.errors(judge.call(generated))
    for i, error in enumerate(errors):
        if not error.ok:
            raise wrong(f"{choice.rendered.module} ({choice.site.label})", f"output {i} {error.words}")
    return judge.relative(errors)


def wrong(name: str, problem: str) -> RunFailure:
    """Returns the error for a kernel or group `name` that computes wrong values. `problem` describes the values."""
    return RunFailure(f"{name}: {problem}", "wrong code is not timed; `specc verify` reports more")
