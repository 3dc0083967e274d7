"""Measures every kernel of a plan beside eager Torch, torch.compile, and the library's bare product."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from specc.compiler.kernels.kernel import Site
from specc.compiler.plan.plan import Choice, Plan
from specc.compiler.programs.cost import NodeCost
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.plain import bare_product, plain_site
from specc.runtime.bench.timing import Measured, alternate
from specc.runtime.bench.variants import GENERATED, LIBRARY, baselines, failures
from specc.runtime.errors import RunFailure
from specc.runtime.verify.judge import Composed, Judge, on_domain
from specc.runtime.verify.random_inputs import Operands, Value, sizes_of

Ready = Callable[[Choice], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: the measured work, its cost, and a time for each variant.

    Attributes:
        name: the path of the node or group.
        kernel: the name of the generated kernel or group, or "library".
        flops: operations of one call, as counted by the compiler.
        moved: bytes that one call moves, as counted by the compiler.
        written: the bytes of outputs among `moved`.
        times: the time of each variant.
        language: the language of the kernel. Empty for a group.
        tile: the tile of the kernel, if it has one. Empty for a group.
        accuracy: the errors. None if the library computes the node.
        failed: the variants that torch.compile could not compile, each with the reason.
    """

    name: str
    kernel: str
    flops: int
    moved: int
    written: int
    times: Mapping[str, Measured]
    language: str = ""
    tile: str = ""
    accuracy: Composed | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> Measured:
        """The time of the code that the plan runs: the generated code, or the library."""
        return self.times.get(GENERATED) or self.times[LIBRARY]

    def ratio(self, variant: str) -> float | None:
        """Returns the time of generated code as a share of a variant's, or None if either is missing."""
        if GENERATED not in self.times or variant not in self.times:
            return None
        return self.times[GENERATED].ms / self.times[variant].ms


def kernel_rows(
    spec: Spec,
    plan: Plan,
    module: ModuleType,
    device: torch.device,
    ready: Ready,
    at: str,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Yields a row for every choice of the plan whose path contains `at`, without duplicates. Kernels that need no nvcc
    are first.

    Args:
        spec: the spec.
        plan: its plan.
        module: the generated model.py.
        device: the device to measure on.
        ready: waits until a choice's kernel can be called. Called after torch.compile is done.
        at: the text that paths must contain.
        say: reports progress.

    Raises:
        RunFailure: if a kernel returns wrong values.
    """
    seen: set[tuple[str, str]] = set()
    for choice in sorted(plan.choices, key=lambda choice: choice.kernel.language in ("cuda", "cutlass")):
        key = (choice.rendered.module, "" if choice.rendered.module else choice.site.label)
        if key in seen or at not in choice.site.label:
            continue
        seen.add(key)
        say(f"kernel {choice.site.label}")
        with torch.no_grad():
            yield _row(spec, plan, module, device, choice, ready)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(spec: Spec, plan: Plan, module: ModuleType, device: torch.device, choice: Choice, ready: Ready) -> Row:
    site, rendered = choice.site, choice.rendered
    cost = cost_of(choice, sizes_of(spec))
    inputs = _inputs(spec, device, choice)
    bare = bare_product(site)
    if not rendered.function:  # the library computes the node unchanged
        library = bare or plain_site(site)
        times = alternate({LIBRARY: lambda: library(*inputs)}, device, cost.bytes)
        return Row(site.label, "library", cost.flops, cost.bytes, written_by(site, sizes_of(spec)), times, "torch")
    others = baselines(plain_site(site), device)
    if bare is not None:
        others[LIBRARY] = bare
    failed = failures({name: _bind(other, inputs) for name, other in others.items()})
    ready(choice)
    calls = {name: call for name, call in others.items() if name not in failed}
    calls = {GENERATED: vars(module)[plan.called(choice)], **calls}
    accuracy = _accuracy(choice, inputs, calls[GENERATED])
    bound: dict[str, Callable[[], Any]] = {name: _bind(call, inputs) for name, call in calls.items()}
    times = alternate(bound, device, cost.bytes)
    return Row(
        site.label,
        rendered.module,
        cost.flops,
        cost.bytes,
        written_by(site, sizes_of(spec)),
        times,
        choice.kernel.language,
        rendered.tile,
        accuracy,
        failed,
    )


def _bind(call: Callable[..., Any], inputs: list[Value]) -> Callable[[], Any]:
    return lambda: call(*inputs)


def cost_of(choice: Choice, sizes: Mapping[str, int]) -> NodeCost:
    """Returns the compiler's cost of the node of a choice: the least operations and bytes, whatever its kernel moves in
    between."""
    node, inputs = choice.site.node, choice.site.inputs
    flops = node.op.flops(inputs[: node.op.arity] if node.epilogue else inputs, node.types, sizes)
    moved = sum(type.bytes(sizes) for type in (*inputs, *node.types))
    return NodeCost(node.name, node.op.name, flops, moved, node.op.matrix)


def written_by(site: Site, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of a node's outputs."""
    return sum(type.bytes(sizes) for type in site.node.types)


def _inputs(spec: Spec, device: torch.device, choice: Choice) -> list[Value]:
    """Returns random inputs in the domain of the node, on which its value is a number."""
    inputs = Operands(spec, device).of(choice.site.node.inputs, choice.site.inputs)
    return list(on_domain(choice.site, inputs, inputs))  # type: ignore[arg-type]


def _accuracy(choice: Choice, inputs: list[Any], generated: Callable[..., Any]) -> Composed:
    """Returns the judge's errors for a sample of one call. Raises RunFailure if the values are wrong."""
    judge = Judge.of(choice.site, inputs, sample=True)
    errors = judge.errors(judge.call(generated))
    for i, error in enumerate(errors):
        if not error.ok:
            raise wrong(f"{choice.rendered.module} ({choice.site.label})", f"output {i} {error.words}")
    return judge.relative(errors)


def wrong(name: str, words: str) -> RunFailure:
    """Returns the error for a kernel or a group with wrong values, which is not timed."""
    return RunFailure(f"{name}: {words}", "what is wrong gets no time; `specc verify` tells more")
