"""From a spec to a plan: the passes in their order."""

from collections.abc import Callable
from functools import lru_cache

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.int8.fake_quantize import round_inputs
from specc.compiler.int8.products import quantize_products
from specc.compiler.passes.assign_quant import allocation, assign_quant
from specc.compiler.passes.fuse import fuse
from specc.compiler.passes.optimizers import owners
from specc.compiler.passes.select_kernels import select_kernels
from specc.compiler.passes.uncached import uncached
from specc.compiler.passes.verify import verify
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.compiler.targets import TARGETS

Pass = Callable[[Programs, Spec], Programs]

PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("assign_quant", lambda programs, spec: assign_quant(programs, spec.quant)),
    ("round_inputs", lambda programs, spec: round_inputs(programs, spec.quant, spec.train)),
    ("fuse", lambda programs, spec: fuse(programs, spec.fuse)),
)


def lower(spec: Spec, target: str) -> Programs:
    """The programs of a spec as they are before any pass, in the dtype of `target`. Raises LoweringError."""
    return _lowered(spec.model, spec.name, TARGETS[target].dtype, spec.eval.halves)


@lru_cache(maxsize=8)  # a build asks for the same ones again and again: to plan, to deploy, to count; all is immutable
def _lowered(model: Architecture, name: str, dtype: str, halves: bool) -> Programs:
    programs = model.lower(name, dtype, halves)
    verify(programs, "lower")
    return programs


def run(spec: Spec, target: str, until: str | None = None) -> Programs:
    """The programs after all passes, or after the one named `until` (`lower` for none).

    Raises LoweringError with the problems of every pass that found some.
    """
    programs = lower(spec, target)
    problems: list[Problem] = []
    if until == "lower":
        return programs
    for name, step in PIPELINE:
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
    """The plan of a spec on one target, with the kernels that `lock` has measured. Raises LoweringError with
    everything that is wrong, SpeccError for a lock that this compiler cannot follow."""
    problems: list[Problem] = []
    programs = lower(spec, target)
    try:
        owners(spec.train.optimizers, {param.name: param.shape for param in programs.params})
    except LoweringError as error:
        problems += error.problems
    try:
        programs = run(spec, target)
        made = select_kernels(programs, TARGETS[target], spec.model.title, source, lock)
    except LoweringError as error:
        problems += error.problems
    if problems:
        raise LoweringError(tuple(problems))
    return made


def deployed(spec: Spec, target: str) -> Programs | None:
    """The programs that run from an artifact, where the spec has products computed in whole numbers; None where it has
    none, so that the artifact's weights are brought back to floats for the programs of training.

    Fusion points are of these: a deployed product has an epilogue of what follows it. Raises LoweringError.
    """
    programs = lower(spec, target)
    schemes = allocation(spec.quant, programs.params)
    if not any(scheme.integer for scheme in schemes.values()):
        return None
    assert spec.quant is not None  # else all is f32
    made = quantize_products(assign_quant(programs, spec.quant), spec.quant, schemes)
    verify(made, "quantize_products")
    return made


def deployed_plan(spec: Spec, target: str, source: str) -> Plan | None:
    """The plan of `deployed`; None where that is. Raises LoweringError."""
    programs = deployed(spec, target)
    return select_kernels(programs, TARGETS[target], spec.model.title, source) if programs is not None else None


def uncached_plan(spec: Spec, target: str, source: str) -> Plan:
    """The plan of a model of pairs that decodes without a cache, and without fusion points. Raises ValueError for a
    model that cannot be cut so, LoweringError."""
    programs = uncached(run(spec.model_copy(update={"fuse": ()}), target))
    verify(programs, "uncached")
    return select_kernels(programs, TARGETS[target], spec.model.title, source)
