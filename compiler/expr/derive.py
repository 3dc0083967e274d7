"""Derivatives of expressions, and degrees of homogeneity. A degree is determined separately for each outcome of the
conditions in an expression."""

from collections.abc import Hashable
from fractions import Fraction
from functools import lru_cache
from math import isclose

from .algebra import addends, exponent_of, is_sum, key, settle
from .evaluate import number
from .parse import parse
from .primitives import PRIMITIVES
from .simplify import assume, compare, simplify
from .traverse import rebuild, substitute, variables
from .values import ONE, ZERO, Binary, Call, Compare, Expr, ExprError, Neg, Var, children

CASES = 64  # maximum number of combinations of outcomes of conditions
# Sample points; no common function has a kink at one of them
SAMPLES = (-71.0, -3.3, -0.83, -0.0197, 0.0231, 0.71, 4.1, 67.0)
TERMS = 64  # maximum number of terms of an expanded product


@lru_cache(maxsize=1 << 14)
def derive(expr: Expr, var: str) -> Expr:
    """Returns the simplified derivative with respect to `var`.

    At ties, min and max give each argument half of the gradient. The derivative of `where` is the derivative of the
    selected arm.
    """
    # Simplified first, because a simplified power of a product is differentiated factor by factor
    return simplify(_derive(simplify(expr), var))


def _derive(expr: Expr, var: str) -> Expr:
    if var not in variables(expr):
        return ZERO
    match expr:
        case Var():
            return ONE
        case Neg(a):
            return -_derive(a, var)
        case Binary("+" | "-" as op, a, b):
            return Binary(op, _derive(a, var), _derive(b, var))
        case Binary("*", a, b):
            return _derive(a, var) * b + a * _derive(b, var)
        case Binary("/"):
            return _derive_quotient(simplify(expr), var)
        case Binary("**", a, b):
            exponent = number(b)
            if exponent < 0 and is_sum(a):
                return _derive_quotient(simplify(expr), var)
            less = float(exponent_of(exponent) - 1)  # exact for rational exponents, unlike 1.6667 - 1 in floats
            return exponent * a**less * _derive(a, var) if exponent else ZERO
        case Call("where", (condition, a, b)):
            return Call("where", (condition, _derive(a, var), _derive(b, var)))
        case Call("min" | "max" as name, (a, b)):
            slope_a, slope_b = _derive(a, var), _derive(b, var)
            return _extremum(name, a, b, slope_a, slope_b)
        case Call(name, args):
            slope = substitute(parse(PRIMITIVES[name].derivative), dict(zip("xs", args, strict=False)))
            return slope * _derive(args[0], var)
    return ZERO


def _derive_quotient(expr: Expr, var: str) -> Expr:
    """Differentiates a simplified quotient a / b with respect to `var`, as (a' - (a / b) b') / b.

    The textbook form divides by b ** 2, which may overflow although b does not.
    """
    match expr:
        case Binary("/", a, b):
            return (_derive(a, var) - expr * _derive(b, var)) / b
    return _derive(expr, var)  # simplified to a sigmoid or a power


def _extremum(name: str, a: Expr, b: Expr, first_arm: Expr, second_arm: Expr) -> Expr:
    first, second = (">", "<") if name == "max" else ("<", ">")
    tie = Call("where", (Compare(second, a, b), second_arm, 0.5 * first_arm + 0.5 * second_arm))
    return Call("where", (Compare(first, a, b), first_arm, tie))


def homogeneous_degree(expr: Expr, var: str) -> float | None:
    """Returns the degree of homogeneity of `expr` as a function f of x, where x is the variable `var`. The degree is
    the number k for which x f'(x) == k f(x) for all x (Euler). Returns None if there is no such k, or if the outcomes
    of the conditions in `expr` have too many combinations.

    For example, f(x) = leaky_relu(x, 0.5) ** 2 has k = 2, so f(x) = f'(x) x / 2. The zero function has degree 0.
    """
    degree: Fraction | None = None
    slope = derive(expr, var)
    if not _homogeneous_at_samples(expr, slope, var):
        return None
    try:
        cases = _cases((_as_where(expr), _as_where(Var(var) * slope)))
    except ExprError:  # a case divides by zero
        return None
    for value, slope in cases:
        have, want = polynomial(value), polynomial(slope)
        if not have and not want:
            continue
        if not have:
            return None
        monomial, coefficient = next(iter(have.items()))
        k = settle(want.get(monomial, Fraction(0)) / coefficient)
        if (degree is not None and k != degree) or {m: settle(c * k) for m, c in have.items() if k} != want:
            return None
        degree = k
    return float(degree or 0)


def _homogeneous_at_samples(expr: Expr, slope: Expr, var: str) -> bool:
    """Returns whether x f'(x) / f(x) is the same at a few sample points, where x is `var`, f is `expr` and f' is
    `slope`. If the ratio differs, `expr` is not homogeneous, and its pieces need not be examined one by one."""
    ratios = []
    for x in SAMPLES:
        at = {name: 0.37 + 0.11 * i for i, name in enumerate(variables(expr))} | {var: x}
        try:
            ratios.append(x * number(slope, **at) / number(expr, **at))
        except (ExprError, ZeroDivisionError):  # undefined or 0 at this point
            continue
    return all(isclose(ratio, ratios[0], rel_tol=1e-6, abs_tol=1e-9) for ratio in ratios)


def _as_where(expr: Expr) -> Expr:
    """Rewrites abs, min and max as `where`. relu and leaky_relu are not rewritten, because `assume` simplifies them."""
    expr = rebuild(expr, _as_where)
    match expr:
        case Call("abs", (u,)):
            return _extremum("max", u, ZERO, u, -u)
        case Call("min" | "max" as name, (a, b)):
            return _extremum(name, a, b, a, b)
    return expr


def _cases(exprs: tuple[Expr, ...]) -> list[tuple[Expr, ...]]:
    """Returns one version of `exprs` for every combination of outcomes of the conditions in `exprs`. The versions have
    no conditions, unless there are more than CASES combinations."""
    done: list[tuple[Expr, ...]] = []
    waiting = [tuple(simplify(expr) for expr in exprs)]
    while waiting:
        case = waiting.pop()
        condition = next((inner for expr in case for inner in [_condition(expr)] if inner), None)
        if condition is None or len(done) + len(waiting) >= CASES:
            done.append(case)
        else:
            waiting += [tuple(assume(expr, condition, truth) for expr in case) for truth in (True, False)]
    return done


def _condition(expr: Expr) -> Compare | None:
    match expr:
        case Call("where", (Compare() as condition, _, _)):
            return condition
        case Call("relu" | "leaky_relu", (u, *_)):
            return compare(">", u, ZERO)
    return next((inner for part in children(expr) for inner in [_condition(part)] if inner), None)


Powers = frozenset[tuple[Hashable, Fraction]]


def polynomial(expr: Expr) -> dict[Powers, Fraction]:
    """Expands a simplified expression to a polynomial, a dict from monomials to coefficients. Equal polynomials mean
    equal expressions."""
    total: dict[Powers, Fraction] = {}
    for coefficient, factors in addends(expr):
        terms: dict[Powers, Fraction] = {frozenset(): coefficient}
        for base, exponent in factors:
            times = int(exponent) if is_sum(base) and exponent in (1, 2, 3) else 0
            inner = polynomial(base) if times else {}
            if times and len(terms) * len(inner) ** times <= TERMS:
                for _ in range(times):
                    terms = _times(terms, inner)
            else:
                terms = _times(terms, {frozenset({(key(base), exponent)}): Fraction(1)})
        for monomial, scale in terms.items():
            total[monomial] = settle(total.get(monomial, Fraction(0)) + scale)
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _times(a: dict[Powers, Fraction], b: dict[Powers, Fraction]) -> dict[Powers, Fraction]:
    result: dict[Powers, Fraction] = {}
    for left, x in a.items():
        for right, y in b.items():
            exponents: dict[Hashable, Fraction] = {}
            for base, exponent in (*left, *right):
                exponents[base] = exponents.get(base, Fraction(0)) + exponent
            monomial = frozenset((base, exponent) for base, exponent in exponents.items() if exponent)
            result[monomial] = settle(result.get(monomial, Fraction(0)) + settle(x * y))
    return result
