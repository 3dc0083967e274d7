"""Promotion: the parameters with the largest Hessian traces get more bits, by count or within a byte budget."""

from collections.abc import Callable, Mapping, Sequence

from specc.compiler.pattern import matches
from specc.compiler.quant.scheme import Scheme, SchemeError
from specc.compiler.spec.spec import QuantSpec
from specc.runtime.errors import QuantizeError

Allocation = Mapping[str, Scheme]
Measure = Callable[[Allocation], int]  # bytes


def too_large(size: int, when: str, budget: int, reserved: int, hint: str) -> QuantizeError:
    """The error for an artifact that exceeds its budget with the fewest bits.

    Args:
        size: bytes of the artifact.
        when: the state that has this size, as "before any promotion".
        budget: bytes for the artifact, `reserved` already taken off.
        reserved: bytes of the spec's budget for the code of a submission.
        hint: what to change.
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
    """`base` with some schemes at `to_bits`, in the order of `base`.

    Candidates have a trace, and a scheme of fewer bits that can have `to_bits`. They are promoted by descending
    Hessian trace, which is not divided by the parameter's size (parameter-golf PR 1105 ranks so).

    Args:
        traces: the trace of the Hessian, by parameter name; equal traces rank by name.
        base: the scheme of each parameter.
        count: promote at most so many. None promotes all that fit `budget_bytes`.
        to_bits: the width of promoted parameters.
        match: patterns of names; candidates match one of them. Empty matches all.
        budget_bytes: promote one after another until the next would make `measure` exceed it.
        measure: the bytes of an allocation; required with `budget_bytes`.

    Raises:
        QuantizeError: a pattern matches nothing, `count` exceeds the candidates, or `base` exceeds the budget.
        ValueError: there is neither a count nor a budget, or a budget without `measure`.
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


def promote_within_budget(
    quant: QuantSpec,
    base: Allocation,
    traces: Mapping[str, float],
    estimate: Measure,
    exact: Measure,
    say: Callable[[str], None],
    reserved: int = 0,
) -> Allocation:
    """`base` with the parameters of the largest traces promoted as `quant.promote` says.

    Args:
        quant: its `promote` and `budget_bytes`, `reserved` already taken off.
        base: the scheme of each parameter before promotion.
        traces: the trace of the Hessian, by parameter name.
        estimate: a quick estimate of the bytes; its offset is corrected at `base`. It bounds how many promotions are
            tried first.
        exact: the bytes of the artifact, fully compressed. It decides.
        say: is told of each promotion that is taken back.
        reserved: bytes of the budget for the code of a submission, for messages.

    Raises:
        QuantizeError: `base` exceeds the budget, or the promotion is impossible as asked.
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
    """The parameters with more bits than in `base`, by descending trace, equal traces by name; last those without a
    trace, such as tables that are only looked up."""
    changed = [name for name in base if base[name].bits_per_value() < schemes[name].bits_per_value()]
    return tuple(sorted(changed, key=lambda name: (-traces.get(name, -1.0), name)))
