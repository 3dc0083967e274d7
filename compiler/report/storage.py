"""Estimates the size of an artifact from the spec alone, and warns if the budget may be too small."""

import json
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from specc.compiler.errors import counted
from specc.compiler.passes.assign_quant import Allocation, allocation, fitting, observed
from specc.compiler.pattern import matches
from specc.compiler.pipeline import lower
from specc.compiler.programs.programs import Programs
from specc.compiler.quant.artifact_sections import DATA_DIGEST_BYTES, overhead_bytes, streams
from specc.compiler.quant.scheme import variants
from specc.compiler.records import record
from specc.compiler.spec.spec import QuantSpec, Spec

ROW_BYTES = 24  # compressed bytes per row of the table of int8 arrays
# The overhead is rounded up to a multiple of this number, so that small changes of a spec do not change the overhead
ROUNDED = 1024
FRAME_BYTES = 24  # the most bytes that compression adds to a section
MOST_LISTED = 6  # of more clips, the description states the smallest and the largest


@record
class StoredAs:
    """The parameters of one storage form.

    Attributes:
        stored_as: the label of the form.
        tensors: the number of tensors.
        parameters: the number of elements.
        estimated_bytes: an upper estimate of the bytes in an artifact.
        rule: the rules of `quant` that select the form.
    """

    stored_as: str
    tensors: int
    parameters: int
    estimated_bytes: int
    rule: str


class Storage(NamedTuple):
    """The estimated bytes of an artifact.

    Attributes:
        rows: The storage forms.
        overhead: The bytes of the header, the spec and the table of arrays.
        budget: The limit `quant.budget_bytes`, or None.
        chosen: A description of `quant.promote` or `quant.allocate`, the settings that change the bits of the rules.
            Empty if the spec has neither setting.
        warnings: The reasons why the artifact may not fit.
    """

    rows: tuple[StoredAs, ...]
    overhead: int
    budget: int | None
    chosen: str
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(row.estimated_bytes for row in self.rows) + self.overhead


def storage_of(spec: Spec, programs: Programs, target: str) -> Storage:
    """Estimates the bytes of an artifact of `spec` that is quantized by the rules of `quant`.

    Args:
        spec: the spec.
        programs: the programs of the spec, with their parameters.
        target: the target for which the spec is lowered to compute the warnings.
    """
    schemes = allocation(spec.quant, programs.stored)
    rows = tuple(_rows(spec, schemes, programs))
    overhead = _overhead(spec, schemes, programs)
    budget = spec.quant.budget_bytes if spec.quant is not None else None
    warnings = tuple(_too_large(spec, target, schemes, overhead))
    return Storage(rows, overhead, budget, choice_of_bits(spec.quant), warnings)


def _rows(spec: Spec, schemes: Allocation, programs: Programs) -> Iterator[StoredAs]:
    groups: dict[str, list[tuple[int, int]]] = {}
    rules: dict[str, list[str]] = {}
    for param in programs.stored:
        scheme = schemes[param.name]
        groups.setdefault(scheme.label(), []).append((param.count, scheme.estimate_bytes(param.shape)))
    if spec.quant is not None:
        rules.setdefault(spec.quant.default.label(), []).append("default")
        for rule in spec.quant.rules:
            rules.setdefault(rule.label(), []).append(f"`{rule.match}`")
    for label, sizes in groups.items():
        words = ", ".join(rules.get(label, ["not quantized"]))
        if len(rules.get(label, ())) > 4:
            words = f"a rule for each of {len(rules[label])} tensors"
        yield StoredAs(label, len(sizes), sum(count for count, _ in sizes), sum(size for _, size in sizes), words)


def _overhead(spec: Spec, schemes: Allocation, programs: Programs) -> int:
    data = spec.model_dump(mode="json")
    if spec.quant is not None:
        data["quant"]["rules"] = [{"match": name, **scheme.model_dump(mode="json")} for name, scheme in schemes.items()]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    layout = [(p.name, stored) for p in programs.stored for stored in schemes[p.name].stored(p.shape)]
    texts = [len(zlib.compress(text.encode(), 9))]
    texts += [ROW_BYTES * len(layout)] if any(scheme.integer for scheme in schemes.values()) else []
    frames = FRAME_BYTES * sum(1 for stream in streams(layout) for _ in stream.cuts())
    exact = overhead_bytes(layout, [*texts, DATA_DIGEST_BYTES]) + frames
    return -(-exact // ROUNDED) * ROUNDED


def choice_of_bits(quant: QuantSpec | None) -> str:
    """Returns a description of `quant.promote` or `quant.allocate`, the settings that change the bits of the rules. The
    result is empty if the spec has neither setting."""
    if quant is None:
        return ""
    if quant.allocate is not None:
        widths = ", ".join(map(str, sorted(set(quant.allocate.bits))))
        stds = [f"{clip:g}" for clip in sorted(set(quant.allocate.clip_stds))]
        listed = ", ".join(stds) if len(stds) <= MOST_LISTED else f"{stds[0]} to {stds[-1]}"
        clips = f" and {counted(len(stds), 'clip')} of {listed} deviations" if stds else ""
        chosen = f"chosen per tensor to fit {quant.budget_bytes:,} bytes"
        return f"`{quant.allocate.match}` in {widths} bits{clips}, {chosen}"
    if quant.promote is None:
        return ""
    many = f"the {quant.promote.count} tensors" if quant.promote.count is not None else "as many tensors as fit"
    fit = f" within {quant.budget_bytes:,} bytes" if quant.budget_bytes is not None else ""
    return f"{many} of `{quant.promote.match}` with the largest Hessian trace in int{quant.promote.bits}{fit}"


def _too_large(spec: Spec, target: str, schemes: Allocation, overhead: int) -> Iterator[str]:
    """Yields warnings if the artifact may exceed the budget even with the fewest bits that the settings allow. With
    `quant.allocate`, the first warning states the bytes of this artifact, and the second warning names the largest
    parameters whose bits are fixed. Otherwise, the warning is a hint."""
    if (quant := spec.quant) is None or quant.budget_bytes is None:
        return
    programs, total, fixed = lower(spec, target), overhead, dict[tuple[str, str], int]()
    seen = frozenset().union(*observed(programs))
    if (allocate := quant.allocate) is None:
        if total + sum(schemes[p.name].estimate_bytes(p.shape) for p in programs.stored) > quant.budget_bytes:
            able = [scheme for name, scheme in schemes.items() if name in seen]
            yield f"may not fit: {fitting(able, quant.promote is not None)}"
        return
    for param in programs.stored:
        scheme = schemes[param.name]
        chosen = matches(allocate.match, param.name) and param.name in seen
        options = variants(scheme, allocate.bits, allocate.clip_stds) if chosen else ()
        if len(options) > 1:
            total += min(option.estimate_bytes(param.shape) for option in options)
            continue
        alike = ".".join("*" if word.isdigit() else word for word in param.name.split("."))
        size = scheme.estimate_bytes(param.shape)
        fixed[alike, scheme.label()] = fixed.get((alike, scheme.label()), 0) + size
        total += size
    if total <= quant.budget_bytes:
        return
    largest = sorted(fixed.items(), key=lambda item: -item[1])[:3]
    named = "; ".join(f"{name} {size:,} ({label})" for (name, label), size in largest)
    yield f"may not fit: about {total:,} bytes with the fewest bits that `allocate` can choose"
    if named:
        yield f"fixed by rules: {named}"
