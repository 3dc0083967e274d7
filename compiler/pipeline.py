"""From a spec to a plan: every pass, in order."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.int8.fake_quantize import round_inputs
from specc.compiler.int8.products import quantize_products
from specc.compiler.passes.assign_quant import allocation, assign_quant
from specc.compiler.passes.fuse import fuse
from specc.compiler.passes.optimizers import assign_optimizers
from specc.compiler.passes.select_kernels import select_kernels
from specc.compiler.passes.verify import verify
from specc.compiler.passes.without_cache import uncached
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.compiler.targets import TARGETS

Form = Literal["trained", "deployed", "uncached"]
Pass = tuple[str, Callable[[Programs, Spec], Programs]]
LOWER, SELECT_KERNELS = "lower", "select_kernels"  # the steps before and after all passes: Spec -> Programs -> Plan

ASSIGN_OPTIMIZERS: Pass = ("assign_optimizers", lambda programs, spec: assign_optimizers(programs, spec.train))
ASSIGN_QUANT: Pass = ("assign_quant", lambda programs, spec: assign_quant(programs, spec.quant))
FAKE_QUANTIZE: Pass = ("fake_quantize", lambda programs, spec: round_inputs(programs, spec.quant, spec.train))
FUSE: Pass = ("fuse", lambda programs, spec: fuse(programs, spec.fuse))
QUANTIZE_PRODUCTS: Pass = ("quantize_products", lambda programs, spec: quantize_products(programs, spec.quant))
UNCACHED: Pass = ("uncached", lambda programs, spec: uncached(programs))

# The passes that make each form of a model. `deployed` runs from an artifact where products are int8; `uncached`
# decodes pairs without a cache, the baseline of `specc bench`.
PIPELINES: Mapping[Form, tuple[Pass, ...]] = {
    "trained": (ASSIGN_OPTIMIZERS, ASSIGN_QUANT, FAKE_QUANTIZE, FUSE),
    "deployed": (ASSIGN_QUANT, QUANTIZE_PRODUCTS),
    "uncached": (ASSIGN_QUANT, FAKE_QUANTIZE, UNCACHED),
}


def forms() -> Mapping[str, Form]:
    """The name of each pass, in order, and the first form that it is part of."""
    first: dict[str, Form] = {LOWER: "trained"}
    for form, passes in PIPELINES.items():
        first |= {name: form for name, _ in passes if name not in first}
    return {**first, SELECT_KERNELS: "trained"}


def after(spec: Spec, target: str, name: str, lock: Lock = NO_LOCK) -> Programs:
    """The programs after the pass called `name`, in the first form that has it: what `specc ir` prints.

    Raises LoweringError, KeyError for a name of no pass, ValueError for a form that the model does not have.
    """
    if name == SELECT_KERNELS:
        return plan(spec, target, "", lock).programs
    return run(spec, target, name, forms()[name])


def lower(spec: Spec, target: str) -> Programs:
    """The programs of a spec as they are before any pass, in the dtype of `target`. Raises LoweringError."""
    return _lowered(spec.model, spec.name, TARGETS[target].dtype, spec.eval.halves)


@lru_cache(maxsize=8)  # a build asks for the same programs again and again: to plan, to deploy, to count
def _lowered(model: Architecture, name: str, dtype: str, halves: bool) -> Programs:
    programs = model.lower(name, dtype, halves)
    verify(programs, LOWER)
    return programs


def run(spec: Spec, target: str, until: str | None = None, form: Form = "trained") -> Programs:
    """The programs after all passes of a form, or after the one named `until`; each pass is verified.

    Args:
        spec: the spec.
        target: the name of a target, whose dtype the programs have.
        until: the name of the last pass to run; `lower` for none of them, None for all.
        form: the form of the model, which names the passes.

    Returns:
        The programs.

    Raises:
        LoweringError: with the problems of every pass that has some.
        ValueError: for a form that the model does not have.
    """
    programs = lower(spec, target)
    problems: list[Problem] = []
    for name, step in PIPELINES[form] if until != LOWER else ():
        try:
            programs = step(programs, spec)
            verify(programs, name)
        except LoweringError as error:
            problems += error.problems
        if name == until:
            break
    if problems:
        raise LoweringError(tuple(problems))
    return programs


def plan(spec: Spec, target: str, source: str, lock: Lock = NO_LOCK) -> Plan:
    """The plan of a spec on one target, with the kernels that `lock` has measured.

    Args:
        spec: the spec.
        target: the name of the target.
        source: the path of the spec as generated files state it.
        lock: the measured kernels and tiles.

    Returns:
        The plan.

    Raises:
        LoweringError: with everything that is wrong.
        SpeccError: for a lock that this compiler cannot follow.
    """
    return select_kernels(run(spec, target), TARGETS[target], spec.model.title, source, lock)


def deployed(spec: Spec, target: str) -> Programs | None:
    """The programs that run from an artifact, where the spec has products computed in whole numbers; None where it has
    none, so that the artifact's weights are brought back to floats for the programs of training.

    Fusion points are of these: a deployed product has an epilogue of what follows it. Raises LoweringError.
    """
    schemes = allocation(spec.quant, lower(spec, target).params)
    return run(spec, target, form="deployed") if any(scheme.integer for scheme in schemes.values()) else None


def deployed_plan(spec: Spec, target: str, source: str) -> Plan | None:
    """The plan of `deployed`; None where that is. Raises LoweringError."""
    programs = deployed(spec, target)
    return select_kernels(programs, TARGETS[target], spec.model.title, source) if programs is not None else None


def uncached_plan(spec: Spec, target: str, source: str) -> Plan:
    """The plan of a model of pairs that decodes without a cache. Raises ValueError for a model that cannot be cut so,
    LoweringError."""
    programs = run(spec, target, form="uncached")
    return select_kernels(programs, TARGETS[target], spec.model.title, source)
