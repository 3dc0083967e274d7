"""Estimates the bytes of an artifact before training: an upper bound per stored form, and warnings about the budget."""

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from specc.compiler.passes.assign_quant import Allocation, allocation, calibrated, looked_up
from specc.compiler.pattern import matches
from specc.compiler.pipeline import lower
from specc.compiler.programs.programs import Programs
from specc.compiler.quant.variants import variants
from specc.compiler.spec.spec import QuantSpec, Spec

# Sizes of the artifact format in runtime/artifact/sections.py.
HEADER_BYTES, SECTION_BYTES, LONGEST_SECTION = 112, 44, 512 * 2**10
JOINED_BYTES = 16 * 2**10  # smaller arrays of one role share a section with others of their dtype
ENTRY_BYTES = 24  # of a compressed row of the table of arrays, which integer schemes need
ROUNDED = 1024  # so that small changes of the spec, e.g. another learning rate, do not change the estimate
FRAME_BYTES = 24  # the most that compression adds to a section of any size


@dataclass(frozen=True, slots=True)
class StoredAs:
    """All parameters of one stored form.

    `tensors` and `parameters` are counts. `bytes` is about an upper bound. `rule` is the rule that selects the form.
    """

    label: str
    tensors: int
    parameters: int
    bytes: int
    rule: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The contents of an artifact. `overhead` is the bytes of its header, its spec and its table of arrays."""

    rows: tuple[StoredAs, ...]
    overhead: int
    budget: int | None
    chosen: str
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows) + self.overhead


def storage_of(spec: Spec, programs: Programs, target: str) -> Storage:
    """Returns the stored form of every parameter of a spec, by the rules of `quant`."""
    schemes = allocation(spec.quant, programs.params)
    rows = tuple(_rows(spec, schemes, programs))
    overhead = _overhead(spec, schemes, programs)
    budget = spec.quant.budget_bytes if spec.quant is not None else None
    warnings = tuple(_too_large(spec, target, schemes, overhead))
    return Storage(rows, overhead, budget, choice_of_bits(spec.quant), warnings)


def _rows(spec: Spec, schemes: Allocation, programs: Programs) -> Iterator[StoredAs]:
    groups: dict[str, list[tuple[int, int]]] = {}
    rules: dict[str, list[str]] = {}
    for param in programs.params:
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
    """Returns about an upper bound of the bytes that are not arrays.

    The spec inside an artifact has a rule for each tensor.
    """
    data = spec.model_dump(mode="json")
    if spec.quant is not None:
        data["quant"]["rules"] = [{"match": name, **scheme.model_dump(mode="json")} for name, scheme in schemes.items()]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    sizes: Counter[tuple[str, str, str]] = Counter()
    for param in programs.params:
        alike = re.sub(r"[.][0-9]+(?=[.]|$)", ".*", param.name)
        for stored in schemes[param.name].stored(param.shape):
            sizes[alike, stored.suffix, stored.dtype] += stored.bytes
    joined = {(suffix == "scale", dtype) for (_, suffix, dtype), size in sizes.items() if size < JOINED_BYTES}
    own = sum(-(-size // LONGEST_SECTION) for size in sizes.values() if size >= JOINED_BYTES)
    sections, arrays = 1 + own + len(joined), sum(len(schemes[p.name].stored(p.shape)) for p in programs.params)
    table = any(scheme.integer for scheme in schemes.values())
    entries = (SECTION_BYTES + FRAME_BYTES + ENTRY_BYTES * arrays) * table
    exact = HEADER_BYTES + len(zlib.compress(text.encode(), 9)) + (SECTION_BYTES + FRAME_BYTES) * sections + entries
    return -(-exact // ROUNDED) * ROUNDED


def choice_of_bits(quant: QuantSpec | None) -> str:
    """Returns what quantization chooses in addition to the rules, in words; empty if it chooses nothing."""
    if quant is None:
        return ""
    if quant.allocate is not None:
        wish, widths = quant.allocate, ", ".join(map(str, sorted(set(quant.allocate.bits))))
        stds = ", ".join(f"{clip:g}" for clip in sorted(set(wish.clip_stds)))
        clips = f" and clips of {stds} deviations" if stds else ""
        return f"each of `{wish.match}` at {widths} bits{clips}, chosen together within {quant.budget_bytes:,} bytes"
    if quant.promote is None:
        return ""
    many = f"the {quant.promote.count} tensors" if quant.promote.count is not None else "as many tensors"
    fit = f" within {quant.budget_bytes:,} bytes" if quant.budget_bytes is not None else ""
    best = f"of largest Hessian trace among `{quant.promote.match}` to int{quant.promote.bits}"
    return f"{many} {best}{fit}, chosen at quantization"


def _too_large(spec: Spec, target: str, schemes: Allocation, overhead: int) -> Iterator[str]:
    """Yields a warning if no choice of `quant.allocate` may fit the budget.

    The first line has the least bytes. The second has the largest parameters that `quant.allocate` does not choose for.
    """
    if (quant := spec.quant) is None or (wish := quant.allocate) is None or quant.budget_bytes is None:
        return
    programs, total, fixed = lower(spec, target), overhead, dict[tuple[str, str], int]()
    seen = calibrated(programs) | looked_up(programs)
    for param in programs.params:
        scheme = schemes[param.name]
        chosen = matches(wish.match, param.name) and param.name in seen
        options = variants(scheme, wish.bits, wish.clip_stds) if chosen else ()
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
    yield f"may not fit: with the fewest bits that `allocate` may choose still about {total:,} bytes"
    if named:
        yield f"not for it to choose: {named}"
