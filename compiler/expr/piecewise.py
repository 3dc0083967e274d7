"""Predicates of piecewise expressions, for the rules of the simplifier."""

from fractions import Fraction

from .algebra import Factor, Factors, addends, flat, is_sum, key, positive
from .values import ZERO, Call, Compare, Const, Expr

FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}

# For each comparison, the orderings of (a, b) for which it is true: -1 for a < b, 0 for a == b, 1 for a > b.
ORDERINGS = {"<": {-1}, "<=": {-1, 0}, ">": {1}, ">=": {1, 0}, "==": {0}, "!=": {-1, 1}}


def implied(question: Expr, known: Compare, truth: bool) -> bool | None:
    """Returns the value of `question`, given that `known` has the value `truth`. Returns None if `known` does not
    determine the value of `question`."""
    assert isinstance(question, Compare)
    if (key(question.a), key(question.b)) != (key(known.a), key(known.b)):
        return None
    possible = ORDERINGS[known.op] if truth else {-1, 0, 1} - ORDERINGS[known.op]
    if possible <= ORDERINGS[question.op]:
        return True
    return None if possible & ORDERINGS[question.op] else False


def decided(factor: Factor, condition: Compare, short: bool) -> bool:
    """Returns whether the outcome of the condition simplifies this factor.

    The outcome simplifies a `where` with this condition, and a relu or leaky_relu of the compared operand. If `short`
    is True, the outcome also simplifies the compared operand itself.
    """
    base, exponent = factor
    if exponent.denominator != 1:
        return False
    match base, condition:
        case Call("where", (other, Const(a), Const(b))), _ if a and b:
            return key(other) == key(condition)
        case Call("where", (other, _, _)), _:
            return exponent > 0 and key(other) == key(condition)
        case Call("relu" | "leaky_relu", (u, *_)), Compare(">", v, Const(0.0)):
            return exponent > 0 and key(u) == key(v)
        case _, Compare(">", v, Const(0.0)):
            return short and exponent > 0 and key(base) == key(v)
    return False


def has_zero_arm(expr: Expr) -> bool:
    match expr:
        case Call("where", (_, a, b)):
            return ZERO in (a, b) or has_zero_arm(a) or has_zero_arm(b)
    return False


def may_be_infinite(factors: Factors) -> bool:
    return any(exponent < 0 and not positive(base) for base, exponent in flat(factors))


def single_where(factors: Factors) -> Call | None:
    match factors:
        case ((Call("where", _) as choice, Fraction(numerator=1, denominator=1)),):
            return choice
    return None


def logistic_argument(base: Expr) -> Expr | None:
    """Returns u if the base is 1 + exp(u), otherwise None. The reciprocal of 1 + exp(u) is sigmoid(-u)."""
    match sorted(addends(base), key=lambda term: len(term[1])) if is_sum(base) else []:
        case [(1, ()), (1, ((Call("exp", (u,)), 1),))]:
            return u
    return None
