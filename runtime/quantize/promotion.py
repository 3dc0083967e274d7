"""Promotion: assigns more bits to the parameters with the largest Hessian traces, by count or within a byte budget."""

from collections.abc import Callable, Mapping, Sequence

from specc.compiler.pattern import matches
from specc.compiler.quant.scheme import Scheme, SchemeError
from specc.compiler.spec.spec import QuantSpec
from specc.runtime.errors import QuantizeError

Allocation = Mapping[str, Scheme]
Measure = Callable[[Allocation], int]  # bytes


def too_large(size: int, when: str, budget: int, reserved: int, hint: str) -> QuantizeError:
    """Returns the error for an artifact that exceeds its budget even with the fewest bits.

    Args:
        size: the size of the artifact in bytes.
        when: the state that has this size, e.g. "before any promotion".
        budget: the size limit of the artifact in bytes, with `reserved` already subtracted.
        reserved: bytes of the spec's budget for the code of a submission.
        hint: the setting to change.

    Returns:
        The error, for the caller to raise.
    """
    less = f", less {reserved:,} for the code" if reserved else ""
    whole = budget + reserved
    return QuantizeError(f"the artifact takes {size:,} bytes {when}, and the budget is {whole:,}{less}", hint)


def promote(
    traces: Mapping[str, float],
    base: Allocation,
    *,
    count: int | None,
    to_bits: int,
    match: Sequence[str],
    budget_bytes: int | None,
    measure: Measure | None,
) -> dict[str, Scheme]:
    """Returns `base` with the schemes of promoted parameters at `to_bits`, in the order of `base`.

    A candidate has a Hessian trace, and a scheme with fewer bits that supports `to_bits`. Candidates are promoted by
    descending trace, which is not divided by the size of the parameter (the ranking of parameter-golf PR 1105).

    Args:
        traces: the trace of the Hessian, by parameter name. Equal traces rank by name.
        base: the scheme of each parameter.
        count: the maximum number of promotions. None promotes all that fit `budget_bytes`.
        to_bits: the bits of promoted parameters.
        match: patterns of names. A candidate matches at least one pattern; an empty sequence matches all names.
        budget_bytes: the size limit in bytes. Promotion stops before the first candidate that exceeds it.
        measure: returns the bytes of an allocation; required with `budget_bytes`.

    Returns:
        The scheme of each parameter, in the order of `base`.

    Raises:
        QuantizeError: a pattern matches no parameter, `count` without a budget exceeds the number of candidates, or
            `base` exceeds the budget.
        ValueError: both `count` and `budget_bytes` are None, or `budget_bytes` is set without `measure`.
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
    """Returns `scheme` at `to_bits`; None if it does not support `to_bits` or already has at least as many bits."""
    if scheme.bits_per_value() >= to_bits:
        return None
    try:
        return scheme.with_bits(to_bits)
    except SchemeError:
        return None


def promote_within_budget(
    quant: QuantSpec,
    base: Allocation,
    traces: Mapping[str, float],
    estimate: Measure,
    exact: Measure,
    say: Callable[[str], None],
    reserved: int = 0,
) -> Allocation:
    """Returns `base` with the parameters of the largest Hessian traces promoted by `quant.promote` within the budget.

    Args:
        quant: supplies `promote` and `budget_bytes`, with `reserved` already subtracted.
        base: the scheme of each parameter before promotion.
        traces: the trace of the Hessian, by parameter name.
        estimate: returns a quick estimate of the bytes of an allocation. Its offset is corrected at `base`. It
            determines the first number of promotions to measure.
        exact: returns the bytes of the compressed artifact. It decides whether an allocation fits.
        say: called with a line of text for each promotion that is undone because the artifact exceeds the budget.
        reserved: bytes of the budget for the code of a submission; used in messages only.

    Returns:
        The scheme of each parameter, in the order of `base`.

    Raises:
        QuantizeError: `base` exceeds the budget, or `promote` raises for the same settings.
    """
    wish, budget = quant.promote, quant.budget_bytes

    def promoted_within(limit: int | None, measure: Measure | None) -> dict[str, Scheme]:
        assert wish is not None
        return promote(
            traces,
            base,
            count=wish.count,
            to_bits=wish.bits,
            match=(wish.match,),
            budget_bytes=limit,
            measure=measure,
        )

    if budget is None:
        return base if wish is None else promoted_within(None, None)
    smallest = exact(base)
    if smallest > budget:
        raise too_large(
            smallest,
            "before any promotion",
            budget,
            reserved,
            "`quant.allocate: {bits: [4, 5, 6]}` in place of quant.promote chooses among widths that fit; or raise "
            "quant.budget_bytes",
        )
    if wish is None:
        return base
    offset = smallest - estimate(base)
    widest = promoted_within(0, lambda _: 0)
    order = promoted(base, widest, traces)
    guess = promoted_within(budget, lambda schemes: estimate(schemes) + offset)
    count = len(promoted(base, guess, traces))

    def first(n: int) -> Allocation:
        return {name: widest[name] if name in order[:n] else scheme for name, scheme in base.items()}

    if count and (taken := exact(first(count))) > budget:
        while count and taken > budget:
            count -= 1
            say(f"{taken:,} bytes are over the budget of {budget:,}: {order[count]} keeps its bits")
            taken = exact(first(count)) if count else smallest
    else:
        while count < len(order) and exact(first(count + 1)) <= budget:
            count += 1
    return first(count)


def promoted(base: Allocation, schemes: Allocation, traces: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the names of the parameters with more bits than in `base`, by descending Hessian trace.

    Equal traces rank by name. Parameters without a trace, such as tables that are only looked up, come last.
    """
    changed = [name for name in base if base[name].bits_per_value() < schemes[name].bits_per_value()]
    return tuple(sorted(changed, key=lambda name: (-traces.get(name, -1.0), name)))
