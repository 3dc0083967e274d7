"""Which parameters get more bits when the artifact has a budget: by estimate first, then by exact bytes."""

from collections.abc import Callable, Mapping

from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import QuantSpec
from specc.runtime.quantize.allocate import Measure, promote, too_large

Allocation = Mapping[str, Scheme]


def choose(
    quant: QuantSpec,
    base: Allocation,
    sensitivity: Mapping[str, float],
    estimate: Measure,
    exact: Measure,
    say: Callable[[str], None],
    code: int = 0,
) -> Allocation:
    """`base` with the parameters of largest `sensitivity` promoted as `quant.promote` says.

    Both measures give bytes. With a byte budget the quick `estimate`, moved to be right for `base`, finds
    about how many promotions fit. Then `exact`, which compresses everything as the artifact will be, takes
    the last ones back or admits more, so that as many are promoted as the budget and the order allow. `code` are
    the bytes that the budget was lowered by, for what is said of it.

    Raises QuantizeError when `base` alone exceeds the budget, or promotion cannot be done as asked.
    """
    wish, budget = quant.promote, quant.budget_bytes

    def promoted_within(limit: int | None, measure: Measure | None) -> dict[str, Scheme]:
        assert wish is not None
        return promote(
            sensitivity,
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
            code,
            "`quant.allocate: {bits: [4, 5, 6]}` in place of quant.promote chooses among widths that fit; or raise "
            "quant.budget_bytes",
        )
    if wish is None:
        return base
    offset = smallest - estimate(base)
    widest = promoted_within(0, lambda _: 0)
    order = promoted(base, widest, sensitivity)
    guess = promoted_within(budget, lambda schemes: estimate(schemes) + offset)
    count = len(promoted(base, guess, sensitivity))

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


def promoted(base: Allocation, schemes: Allocation, sensitivity: Mapping[str, float]) -> tuple[str, ...]:
    """The parameters with more bits than in `base`, by falling sensitivity, equals by name; last those that have none,
    as tables that are only looked up."""
    changed = [name for name in base if base[name].bits_per_value() < schemes[name].bits_per_value()]
    return tuple(sorted(changed, key=lambda name: (-sensitivity.get(name, -1.0), name)))
