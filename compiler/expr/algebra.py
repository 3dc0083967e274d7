"""Converts sums and products to a normal form.

A term is a rational coefficient times factors. A factor is a base and a rational exponent.

Rational arithmetic does not round: 30 * (x / 30) is x, and 0.1 + 0.2 is 0.3. A float is read as the decimal number that
Python prints for the float. Terms and factors are in order of first appearance, so printed text resembles the input.
Two expressions have the same `key` if they differ only in the order of terms and factors.

A quotient whose divisor is a sum (see `is_quotient`) is one factor, and no rule splits this factor. For example,
`a / b * c` does not become `a * c / b`, because `a * c` may overflow although `a / b * c` does not. Likewise,
`a / b / b` does not become `a / b ** 2`.
"""

from collections.abc import Hashable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache, reduce
from operator import mul

from .positional import function_named
from .values import ZERO, Binary, Call, Compare, Const, Expr, ExprError, Logic, Neg, Read, Var, children

Factor = tuple[
    Expr, Fraction
]  # (base, exponent); a base is no number and no product, and is a quotient only if the divisor is a sum
Factors = tuple[Factor, ...]
Term = tuple[Fraction, Factors]

LARGEST = 10**12  # fractions with a larger numerator or denominator are rounded to a double
HALF = Fraction(1, 2)


def rational(value: float) -> Fraction:
    """Returns the decimal number that Python prints for `value`, as an exact fraction."""
    return Fraction(repr(value))


def settle(value: Fraction) -> Fraction:
    """Rounds a fraction to a double if its numerator or denominator exceeds LARGEST. Raises ExprError if the double
    overflows."""
    if max(abs(value.numerator), value.denominator) <= LARGEST:
        return value
    try:
        return rational(float(value))
    except (OverflowError, ValueError):
        raise ExprError("a constant of the expression overflows") from None


def exponent_of(value: float) -> Fraction:
    """Converts an exponent to a fraction. A float close to a simple fraction becomes that fraction: 0.3333333333333333
    is 1/3."""
    exact = rational(value)
    near = exact.limit_denominator(64)
    return near if abs(near - exact) < Fraction(1, 10**12) else exact


def const(value: Fraction) -> Const:
    return Const(float(value))


def is_sum(expr: Expr) -> bool:
    return isinstance(expr, Binary) and expr.op in ("+", "-")


def is_quotient(expr: Expr) -> bool:
    """Returns whether `expr` is a quotient by a sum, min, max or where, or by a product or power with such a factor."""
    return isinstance(expr, Binary) and expr.op == "/" and any(_unbounded(base) for base, _ in split(expr.b)[1])


def _unbounded(base: Expr) -> bool:
    return is_sum(base) or (isinstance(base, Call) and base.function in ("max", "min", "where"))


def split(expr: Expr) -> Term:
    """Splits `expr` into coefficient * base ** exponent * ... A base may occur several times."""
    match expr:
        case Const(value):
            return rational(value), ()
        case Neg(a):
            coefficient, factors = split(a)
            return -coefficient, factors
        case Binary("*", a, b):
            (left, some), (right, more) = split(a), split(b)
            return settle(left * right), some + more
        case Binary("/", a, b):
            coefficient, factors = ratio(a, b)
            if not is_quotient(expr):
                return coefficient, factors
            quotient = product_of(Fraction(1), split(a)[1]) / product_of(Fraction(1), split(b)[1])
            return coefficient, ((quotient, Fraction(1)),)
        case Binary("**", a, Const(value)) if not isinstance(a, Const):
            return Fraction(1), ((a, exponent_of(value)),)
        case Call("sqrt", (a,)) if not isinstance(a, Const):
            return Fraction(1), ((a, HALF),)
    return Fraction(1), ((expr, Fraction(1)),)


def ratio(a: Expr, b: Expr) -> Term:
    """Returns `a / b` as one term: the factors of `a`, then the factors of `b` with negated exponents.

    Raises ExprError if `b` is 0.
    """
    (left, above), (right, below) = split(a), split(b)
    if not right:
        raise ExprError(f"{a / b} divides by zero")
    return settle(left / right), above + tuple((base, -exponent) for base, exponent in below)


def flat(factors: Iterable[Factor]) -> Iterator[Factor]:
    """Yields the factors. A quotient is replaced by the factors of the numerator and, with negated exponents, the
    factors of the denominator."""
    for base, exponent in factors:
        if is_quotient(base) and exponent.denominator == 1:
            assert isinstance(base, Binary)
            yield from ((inner, e * exponent) for inner, e in flat(ratio(base.a, base.b)[1]))
        else:
            yield base, exponent


def addends(expr: Expr, scale: Fraction = Fraction(1)) -> list[Term]:
    """Splits scale * expr into terms. Nested sums, and sums times a number, are expanded."""
    match expr:
        case Binary("+", a, b):
            return addends(a, scale) + addends(b, scale)
        case Binary("-", a, b):
            return addends(a, scale) + addends(b, -scale)
    coefficient, factors = split(expr)
    coefficient = settle(coefficient * scale)
    if len(factors) == 1 and factors[0][1] == 1 and is_sum(factors[0][0]):
        return addends(factors[0][0], coefficient)
    return [(coefficient, factors)]


def monomial_key(factors: Iterable[Factor]) -> Hashable:
    exponents: dict[Hashable, Fraction] = {}
    for base, exponent in flat(factors):
        exponents[key(base)] = exponents.get(key(base), Fraction(0)) + exponent
    return frozenset((base, exponent) for base, exponent in exponents.items() if exponent)


@lru_cache(maxsize=1 << 14)
def key(expr: Expr) -> Hashable:
    """Returns a hashable key of `expr`. Expressions that differ only in the order of terms, of factors, or of the
    arguments of min and max have equal keys."""
    if is_sum(expr):
        return "sum", frozenset((monomial_key(factors), coefficient) for coefficient, factors in addends(expr))
    match expr:
        case Var() | Const():
            return expr
        case Call("sqrt", _) | Neg() | Binary():
            coefficient, factors = split(expr)
            # A power of a number that is not simplified yet, or an operation with // or %
            if factors == ((expr, Fraction(1)),):
                return getattr(expr, "op", "power"), *(key(part) for part in children(expr))
            return "product", coefficient, monomial_key(factors)
        case Call(function, args):
            keys = tuple(key(arg) for arg in args)
            return function, frozenset(keys) if function in ("min", "max") else keys
        case Compare(op, a, b):
            return op, key(a), key(b)
        case Logic(op, parts) | Read(op, parts):
            return type(expr).__name__, op, *map(key, parts)
    raise TypeError(f"not an expression: {expr!r}")


def numeral(value: Fraction) -> tuple[Fraction, Fraction]:
    """Returns the numerator and denominator to print for a number. The denominator is 1 if a float can represent the
    number exactly: 1/2 prints as 0.5. No float is exactly 1/30, so 1/30 prints as a division by 30."""
    if rational(float(value)) == value:
        return value, Fraction(1)
    return Fraction(value.numerator), Fraction(value.denominator)


def rank(factor: Factor) -> int:
    """Returns the sort key of a factor in a product: variables first, then quotients, functions and sums.

    Factors of equal rank stay in order of first appearance. Functions and sums may be as large as the divisor of a
    quotient, so the quotient comes first. Intermediate results then stay small.
    """
    base, _ = factor
    return 0 if isinstance(base, Var) else 1 if is_quotient(base) else 3 if is_sum(base) else 2


def raised(base: Expr, exponent: Fraction) -> Expr:
    if exponent == 1:
        return base
    if exponent == HALF:
        return Call("sqrt", (base,))
    return Binary("**", base, const(exponent))


def product_of(coefficient: Fraction, factors: Iterable[Factor]) -> Expr:
    """Builds the expression of a term, with the coefficient first and one division at the end."""
    if not coefficient:
        return ZERO
    ordered = sorted(factors, key=rank)
    if coefficient == -1 and len(ordered) == 1 and ordered[0][1] == 1 and is_sum(ordered[0][0]):
        return sum_of(addends(ordered[0][0], coefficient))
    match ordered:
        case [(Binary("/", a, b) as quotient, Fraction(numerator=1, denominator=1))] if is_quotient(quotient):
            top, bottom = numeral(coefficient)
            return product_of(top, split(a)[1]) / product_of(bottom, split(b)[1])
    top, bottom = numeral(coefficient)
    over: list[Expr] = [raised(base, exponent) for base, exponent in ordered if exponent > 0]
    under: list[Expr] = [raised(base, -exponent) for base, exponent in ordered if exponent < 0]
    if top == -1 and over:
        over[0] = -over[0]
    elif top != 1 or not over:
        over.insert(0, const(top))
    if bottom != 1:
        under.insert(0, const(bottom))
    return reduce(mul, over) / reduce(mul, under) if under else reduce(mul, over)


def sum_of(terms: Iterable[Term]) -> Expr:
    """Builds the expression of a sum. The first positive term comes first: 1 - x, not -x + 1."""
    left = list(terms)
    if not left:
        return ZERO
    first = next((index for index, (coefficient, _) in enumerate(left) if coefficient > 0), 0)
    result = product_of(*left.pop(first))
    for coefficient, factors in left:
        part = product_of(abs(coefficient), factors)
        result = Binary("+" if coefficient > 0 else "-", result, part)
    return result


def nonnegative(expr: Expr) -> bool:
    """Returns whether `expr` is provably >= 0 wherever it is defined."""
    match expr:
        case Const(value):
            return value >= 0
        case Call(function, _) if function_named(function).sign:
            return True
        case Call("where", (_, a, b)) | Call("min", (a, b)):
            return nonnegative(a) and nonnegative(b)
        case Call("max", (a, b)):
            return nonnegative(a) or nonnegative(b)
        case Binary("+", a, b):
            return nonnegative(a) and nonnegative(b)
        case Binary("*" | "/" | "**", _, _):
            coefficient, factors = split(expr)
            return coefficient >= 0 and all(even(e) or nonnegative(base) for base, e in flat(factors))
    return False


def positive(expr: Expr) -> bool:
    """Returns whether `expr` is provably > 0 wherever it is defined. Underflow to 0 is ignored."""
    match expr:
        case Const(value):
            return value > 0
        case Call(function, _):
            return function_named(function).sign == "> 0"
        case Binary("+", a, b):
            return nonnegative(expr) and (positive(a) or positive(b))
    return False


def even(exponent: Fraction) -> bool:
    return exponent.denominator == 1 and exponent.numerator % 2 == 0
