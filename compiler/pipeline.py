"""The pass pipeline, from a spec to a plan."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.int8.fake_quantize import round_inputs
from specc.compiler.int8.products import quantize_products
from specc.compiler.ir.types import COMPUTE
from specc.compiler.losses.term import LossTerm
from specc.compiler.passes.assign_quant import allocation, assign_quant
from specc.compiler.passes.count_dropout import count_dropout
from specc.compiler.passes.decoding.lookups import lookups
from specc.compiler.passes.decoding.packed_weights import packed_weights
from specc.compiler.passes.decoding.rope_attentions import rope_attentions
from specc.compiler.passes.decoding.rope_writes import rope_writes
from specc.compiler.passes.decoding.row_linears import row_linears
from specc.compiler.passes.derive_weights import derive_weights
from specc.compiler.passes.fold_scales import fold_scales
from specc.compiler.passes.fp8_products import fp8_products
from specc.compiler.passes.fuse import fuse
from specc.compiler.passes.join_groups import join_groups
from specc.compiler.passes.logits import with_logits
from specc.compiler.passes.merge_linears import merge_linears
from specc.compiler.passes.optimizers import assign_optimizers
from specc.compiler.passes.recompute import recompute
from specc.compiler.passes.select_kernels import select_kernels
from specc.compiler.passes.verify import verify
from specc.compiler.passes.wide_linears import wide_linears
from specc.compiler.passes.without_cache import uncached
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.cost import DECODING
from specc.compiler.programs.programs import LoweringError, Programs, in_dtype
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.compiler.targets import TARGETS, Target

Form = Literal["trained", "deployed", "uncached", "exported", "decoding", "packed"]
Pass = tuple[str, Callable[[Programs, Spec, Target], Programs]]
LOWER, SELECT_KERNELS = "lower", "select_kernels"  # the steps before and after all passes: Spec -> Programs -> Plan

ASSIGN_OPTIMIZERS: Pass = ("assign_optimizers", lambda programs, spec, target: assign_optimizers(programs, spec.train))
ASSIGN_QUANT: Pass = ("assign_quant", lambda programs, spec, target: assign_quant(programs, spec.quant))
FAKE_QUANTIZE: Pass = ("fake_quantize", lambda programs, spec, target: round_inputs(programs, spec.quant, spec.train))
COUNT_DROPOUT: Pass = (
    "count_dropout",
    lambda programs, spec, target: count_dropout(programs, spec.model.reads != "lines"),
)
FP8_PRODUCTS: Pass = ("fp8_products", lambda programs, spec, target: fp8_products(programs, spec.train, target))
FUSE: Pass = ("fuse", lambda programs, spec, target: fuse(programs, spec.fuse))
FOLD_SCALES: Pass = ("fold_scales", lambda programs, spec, target: fold_scales(programs, spec.fold))
MERGE_LINEARS: Pass = ("merge_linears", lambda programs, spec, target: merge_linears(programs, spec.merge))
JOIN_GROUPS: Pass = ("join_groups", lambda programs, spec, target: join_groups(programs) if spec.merge else programs)
DERIVE_WEIGHTS: Pass = (
    "derive_weights",
    lambda programs, spec, target: derive_weights(programs) if spec.merge or spec.fold else programs,
)
RECOMPUTE: Pass = ("recompute", lambda programs, spec, target: recompute(programs, spec.train))
WIDE_LINEARS: Pass = ("wide_linears", lambda programs, spec, target: wide_linears(programs))
QUANTIZE_PRODUCTS: Pass = ("quantize_products", lambda programs, spec, target: quantize_products(programs, spec.quant))
UNCACHED: Pass = ("uncached", lambda programs, spec, target: uncached(programs))
ROW_LINEARS: Pass = ("row_linears", lambda programs, spec, target: row_linears(programs))
ROPE_WRITES: Pass = ("rope_writes", lambda programs, spec, target: rope_writes(programs))
LOOKUPS: Pass = ("lookups", lambda programs, spec, target: lookups(programs, target))
ROPE_ATTENTIONS: Pass = ("rope_attentions", lambda programs, spec, target: rope_attentions(programs, target))
PACKED_WEIGHTS: Pass = ("packed_weights", lambda programs, spec, target: packed_weights(programs, spec.quant))
LOGITS: Pass = ("logits", lambda programs, spec, target: with_logits(programs))

# The passes of each form of a model. `deployed` runs from an artifact with int8 products; `uncached` is a
# sequence-to-sequence model that decodes without a cache, the baseline of `specc bench`; `exported` is for files that
# other programs read, such as ONNX; `decoding` appends one token to each text, with kernels for few rows; `packed` also
# appends one token to each text, but runs from an artifact, with kernels that decode the stored codes.
PIPELINES: Mapping[Form, tuple[Pass, ...]] = {
    "trained": (
        ASSIGN_OPTIMIZERS,
        ASSIGN_QUANT,
        FAKE_QUANTIZE,
        COUNT_DROPOUT,
        FP8_PRODUCTS,
        FUSE,
        FOLD_SCALES,
        MERGE_LINEARS,
        JOIN_GROUPS,
        DERIVE_WEIGHTS,
        WIDE_LINEARS,
        RECOMPUTE,
    ),
    "deployed": (ASSIGN_QUANT, QUANTIZE_PRODUCTS),
    "uncached": (ASSIGN_QUANT, FAKE_QUANTIZE, UNCACHED),
    "exported": (ASSIGN_QUANT, LOGITS),
    "decoding": (ROW_LINEARS, ROPE_WRITES, ROPE_ATTENTIONS, LOOKUPS),
    "packed": (ROW_LINEARS, ROPE_WRITES, ROPE_ATTENTIONS, LOOKUPS, PACKED_WEIGHTS),
}


def forms() -> Mapping[str, Form]:
    """Maps the name of each pass, in order, to the first form of the model whose pipeline contains the pass. Forms are
    the keys of PIPELINES."""
    first: dict[str, Form] = {LOWER: "trained"}
    for form, passes in PIPELINES.items():
        first |= {name: form for name, _ in passes if name not in first}
    return {**first, SELECT_KERNELS: "trained"}


def after(spec: Spec, target: str, name: str, lock: Lock = NO_LOCK) -> Programs:
    """Returns the programs after the pass `name`, in the first form of the model whose pipeline contains this pass.
    `specc ir` prints these programs.

    Args:
        spec: The spec.
        target: The name of a target.
        name: The name of a pass, or `lower` or `select_kernels`.
        lock: The measured kernels and tiles, which only `select_kernels` uses.

    Raises:
        LoweringError: If the spec cannot be lowered or a pass fails.
        KeyError: If no pass has that name.
        ValueError: If the model does not have this form.
    """
    if name == SELECT_KERNELS:
        return plan(spec, target, "", lock).programs
    return run(spec, target, name, forms()[name])


def lower(spec: Spec, target: str) -> Programs:
    """Lowers a spec to programs in the dtype of `target`, before any pass. Raises LoweringError if the spec cannot be
    lowered."""
    dtype = spec.computes_in or TARGETS[target].dtype
    programs = _lowered(spec.model, spec.name, dtype, spec.eval.halves, spec.train.losses)
    if programs.context is None or programs.context >= spec.eval.longest:
        return programs
    return replace(programs, context=spec.eval.longest)


@lru_cache(maxsize=8)  # cached, because planning, deployment and counting lower the same programs within one build
def _lowered(model: Architecture, name: str, dtype: str, halves: bool, losses: tuple[LossTerm, ...]) -> Programs:
    if dtype != COMPUTE:
        programs = in_dtype(_lowered(model, name, COMPUTE, halves, losses), dtype)
    else:
        programs = model.lower(name, halves, losses)
    verify(programs, LOWER)
    return programs


def run(spec: Spec, target: str, until: str | None = None, form: Form = "trained") -> Programs:
    """Runs the passes of a form on the programs of a spec. Verifies the programs after each pass.

    Args:
        spec: the spec.
        target: the name of a target. The programs have the dtype of this target.
        until: the name of the last pass to run. With `lower`, no pass runs. With None, all passes run.
        form: the form of the model, which selects the passes.

    Returns:
        The programs after the last pass.

    Raises:
        LoweringError: with the problems of all passes, if any pass reports a problem.
        ValueError: if the model does not have the form.
    """
    programs = lower(spec, target)
    problems: list[Problem] = []
    for name, step in PIPELINES[form] if until != LOWER else ():
        try:
            before, programs = programs, step(programs, spec, TARGETS[target])
            verify(programs, name, before)
        except LoweringError as error:
            problems += error.problems
        if name == until:
            break
    if problems:
        raise LoweringError(tuple(problems))
    return programs


def plan(spec: Spec, target: str, source: str, lock: Lock = NO_LOCK) -> Plan:
    """Plans a spec on one target, with the kernels and tiles measured in `lock`.

    Args:
        spec: the spec.
        target: the name of the target.
        source: the path of the spec for the headers of generated files.
        lock: the measured kernels and tiles.

    Returns:
        The plan.

    Raises:
        LoweringError: with every problem, if the spec cannot be lowered or planned.
        SpeccError: if this compiler cannot use the lock.
    """
    deterministic = spec.train.deterministic
    return select_kernels(run(spec, target), TARGETS[target], spec.model.title, source, lock, deterministic)


def deployed(spec: Spec, target: str) -> Programs | None:
    """Returns the programs that run from an artifact, if some matrix products are computed on int8 codes.

    Otherwise, returns None. The ordinary programs then run with weights that are dequantized to floats. Deployed
    programs have no fusion points, because the operations after an int8 product become the epilogue of the product.
    Raises LoweringError if the spec cannot be lowered.
    """
    return run(spec, target, form="deployed") if _has_integer_products(spec, target) else None


def _has_integer_products(spec: Spec, target: str) -> bool:
    quant = spec.quant
    if quant is None or not any(scheme.integer for scheme in (quant.default, *quant.rules)):
        return False
    return any(scheme.integer for scheme in allocation(quant, lower(spec, target).stored).values())


def deployed_plan(spec: Spec, target: str, source: str) -> Plan | None:
    """Plans the programs that `deployed` returns. Returns None if `deployed` returns None. Raises LoweringError if the
    spec cannot be lowered."""
    programs = deployed(spec, target)
    return select_kernels(programs, TARGETS[target], spec.model.title, source) if programs is not None else None


def uncached_plan(spec: Spec, target: str, source: str) -> Plan:
    """Plans an encoder-decoder that decodes without a cache.

    Raises ValueError if the model cannot be rewritten without a cache, and LoweringError if the spec cannot be
    lowered.
    """
    programs = run(spec, target, form="uncached")
    return select_kernels(programs, TARGETS[target], spec.model.title, source)


def exported_plan(spec: Spec, target: str, source: str) -> Plan:
    """Plans the programs `score` and `logits` without fusion, for export.

    Raises ValueError if an operation cannot be exported, and LoweringError if the spec cannot be lowered.
    """
    return select_kernels(run(spec, target, form="exported"), TARGETS[target], spec.model.title, source)


def reads_codes(spec: Spec, target: str) -> bool:
    """Returns whether the programs that append one token to each text can read the weights of an artifact as codes.

    Only programs for a GPU target can do so, and only if the model reads text, is quantized, and has no integer
    products. Raises LoweringError if the spec cannot be lowered.
    """
    if spec.quant is None or not TARGETS[target].arch:
        return False
    decodes = any(graph.name in DECODING for graph in lower(spec, target).programs)
    return decodes and not _has_integer_products(spec, target)


def decoding_plan(spec: Spec, target: str, source: str, packed: bool = False) -> Plan:
    """Plans the programs that append one token to each text, with kernels for few rows.

    Args:
        spec: the spec.
        target: the name of the target.
        source: the path of the spec for the headers of generated files.
        packed: whether the kernels decode the codes of an artifact of the spec.

    Raises:
        ValueError: if the model has no program that appends tokens.
        LoweringError: if the spec cannot be lowered.
    """
    programs = run(spec, target, form="packed" if packed else "decoding")
    return select_kernels(programs, TARGETS[target], spec.model.title, source)
