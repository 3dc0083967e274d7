"""Gives the parameters that matter most more bits, by count or within a byte budget."""

from collections.abc import Callable, Mapping, Sequence

from specc.compiler.pattern import matches
from specc.compiler.quant.scheme import Scheme, SchemeError
from specc.runtime.errors import QuantizeError

Measure = Callable[[Mapping[str, Scheme]], int]


def too_large(size: int, when: str, budget: int, code: int, hint: str) -> QuantizeError:
    """Of an artifact of `size` bytes at its smallest. `budget` is what the bytes of `code` leave of the one given."""
    less = f", less {code:,} for the code" if code else ""
    return QuantizeError(f"the artifact takes {size:,} bytes {when}, and the budget is {budget + code:,}{less}", hint)


def promote(
    traces: Mapping[str, float],
    base: Mapping[str, Scheme],
    *,
    count: int | None,
    to_bits: int,
    match: Sequence[str],
    budget_bytes: int | None,
    measure: Measure | None,
) -> dict[str, Scheme]:
    """`base` with some schemes at `to_bits`, in the order of `base`.

    Candidates are the names that one of `match` covers (all, if it is empty), that have a trace, and whose
    scheme can take `to_bits` and has fewer. They are promoted by descending Hessian trace, equal traces by
    name: the first `count`, or with a byte budget one after another until the next would make `measure`
    exceed it; with both, at most `count`. The trace is not divided by the parameter's size (parameter-golf PR
    1105 ranks so).

    Raises QuantizeError when a pattern covers nothing, `count` exceeds the candidates, or `base` itself
    exceeds the budget; ValueError when there is neither a count nor a budget, or a budget without `measure`.
    """
    if count is None and budget_bytes is None:
        raise ValueError("promote needs a count or a byte budget")
    if budget_bytes is not None and measure is None:
        raise ValueError("a byte budget needs a measure")
    for pattern in match:
        if not any(matches(pattern, name) for name in base):
            raise QuantizeError(f"promote: {pattern!r} matches no parameter", "specc plan lists the names")

    wider = {name: scheme for name in base if (scheme := _promoted(base[name], to_bits)) is not None}
    order = sorted(
        (n for n in wider if n in traces and (not match or any(matches(p, n) for p in match))),
        key=lambda name: (-traces[name], name),
    )
    if count is not None and budget_bytes is None and count > len(order):
        raise QuantizeError(
            f"promote asks for {count} parameters at int{to_bits}, and only {len(order)} can take it",
            "lower quant.promote.count or widen quant.promote.match",
        )
    chosen = dict(base)
    limit = len(order) if count is None else min(count, len(order))
    if budget_bytes is None or measure is None:
        return {name: wider[name] if name in order[:limit] else scheme for name, scheme in base.items()}

    smallest = measure(chosen)
    if smallest > budget_bytes:
        hint = "use fewer bits, a smaller model, or a larger quant.budget_bytes"
        raise too_large(smallest, "before any promotion", budget_bytes, 0, hint)
    for name in order[:limit]:
        candidate = {**chosen, name: wider[name]}
        if measure(candidate) > budget_bytes:
            break
        chosen = candidate
    return chosen


def _promoted(scheme: Scheme, to_bits: int) -> Scheme | None:
    """`scheme` at `to_bits`; None where it has no width, another range of widths, or as many bits already."""
    if scheme.bits_per_value() >= to_bits:
        return None
    try:
        return scheme.with_bits(to_bits)
    except SchemeError:
        return None
