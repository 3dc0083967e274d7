"""Promotion: gives more bits to the parameters with the largest Hessian traces.

The spec limits either the number of promoted parameters or the size of the artifact.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

from specc.compiler.passes.assign_quant import fitting
from specc.compiler.pattern import matches
from specc.compiler.quant.scheme import Scheme, SchemeError
from specc.compiler.spec.spec import Promote, QuantSpec
from specc.runtime.errors import QuantizeError

Allocation = Mapping[str, Scheme]
Measure = Callable[[Allocation], int]  # bytes


def too_large(size: int, when: str, budget: int, reserved: int, hint: str) -> QuantizeError:
    """Returns the error for an artifact that exceeds its budget even with the fewest bits that the spec allows.

    Args:
        size: the size of the artifact in bytes.
        when: the stage at which the artifact has the size `size`, such as "before any promotion".
        budget: the limit of the artifact in bytes. `reserved` is already subtracted.
        reserved: the bytes that are reserved for the code of a submission.
        hint: the hint of the error, which names the setting to change.

    Returns:
        The error. The caller raises it.
    """
    less = f", less {reserved:,} for the code" if reserved else ""
    total = budget + reserved
    return QuantizeError(f"the artifact takes {size:,} bytes {when}; the budget is {total:,} bytes{less}", hint)


def promote(
    quant: QuantSpec,
    base: Allocation,
    traces: Mapping[str, float],
    estimate: Measure,
    exact: Measure,
    say: Callable[[str], None],
    reserved: int = 0,
) -> Allocation:
    """Returns `base` with more bits for the parameters with the largest Hessian traces, within the budget.

    A candidate is a parameter that matches `quant.promote.match`, has a Hessian trace, and has fewer bits than
    `quant.promote.bits`. The scheme of a candidate must also support `quant.promote.bits`. Candidates are promoted by
    descending trace, as in parameter-golf PR 1105. Promotion stops before the first candidate that would exceed the
    budget.

    Args:
        quant: the settings. The function reads only `promote` and `budget_bytes`, from which `reserved` is already
            subtracted.
        base: the scheme of each parameter before promotion.
        traces: the trace of the Hessian, by parameter name. Equal traces are ordered by name.
        estimate: returns a quick estimate of the size in bytes of an allocation. The estimate determines how many
            parameters the first measured allocation promotes.
        exact: returns the exact size in bytes of the compressed artifact for an allocation. This size decides whether
            the allocation fits.
        say: the function that receives a message for each promotion that is undone to fit into the budget.
        reserved: the number of bytes that the code of a submission occupies, for messages.

    Returns:
        The scheme of each parameter, in the order of `base`.

    Raises:
        QuantizeError: if `base` exceeds the budget, the pattern matches no parameter, or there are too few candidates.
    """
    promotion, budget = quant.promote, quant.budget_bytes
    smallest = exact(base) if budget is not None else 0
    if budget is not None and smallest > budget:
        when = "before any promotion" if promotion is not None else "with the bits of the rules"
        hint = fitting(tuple(base.values()), promotion is not None)
        raise too_large(smallest, when, budget, reserved, hint)
    if promotion is None:
        return base
    wider = _candidates(promotion, base, traces)
    if budget is None and promotion.count is not None and promotion.count > len(wider):
        message = (
            f"quant.promote.count is {promotion.count}, but only {len(wider)} parameters can have int{promotion.bits}"
        )
        raise QuantizeError(message, "lower quant.promote.count or widen quant.promote.match")
    order = list(wider)[: promotion.count]

    def first(count: int) -> Allocation:
        return {name: wider[name] if name in order[:count] else scheme for name, scheme in base.items()}

    if budget is None:
        return first(len(order))
    room = budget - smallest + estimate(base)
    count = next((n for n in range(len(order)) if estimate(first(n + 1)) > room), len(order))
    if count and (size := exact(first(count))) > budget:
        while count and size > budget:
            count -= 1
            say(f"{size:,} bytes are over the budget of {budget:,}: {order[count]} is not promoted")
            size = exact(first(count)) if count else smallest
    else:
        while count < len(order) and exact(first(count + 1)) <= budget:
            count += 1
    return first(count)


def _candidates(promotion: Promote, base: Allocation, traces: Mapping[str, float]) -> dict[str, Scheme]:
    names = [name for name in base if matches(promotion.match, name)]
    if not names:
        raise QuantizeError(
            f"quant.promote.match: {promotion.match!r} matches no parameter",
            "`specc plan` lists the names of the parameters",
        )
    wider: dict[str, Scheme] = {}
    for name in sorted(traces.keys() & set(names), key=lambda name: (-traces[name], name)):
        if base[name].bits_per_value() < promotion.bits:
            with suppress(SchemeError):
                wider[name] = base[name].with_bits(promotion.bits)
    return wider


def promoted(base: Allocation, schemes: Allocation, traces: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the names of the parameters to which `schemes` gives more bits than `base`.

    The names are sorted by descending Hessian trace. Equal traces are sorted by name. Parameters without a trace, such
    as embedding tables, come last.
    """
    changed = [name for name in base if base[name].bits_per_value() < schemes[name].bits_per_value()]
    return tuple(sorted(changed, key=lambda name: (-traces.get(name, -1.0), name)))
