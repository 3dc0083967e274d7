"""Simplifies expressions. Rules are applied from the leaves up, until nothing changes.

In exact arithmetic, the result equals the input wherever the input is defined (x / x is 1). The result has Torch's
subgradient at every kink. Therefore, max(x, 0) does not become relu(x), whose derivative at 0 differs.

Piecewise parts are merged. A product of relu, leaky_relu and `where` with the same condition becomes one `where`. A
`where` that equals a relu becomes relu.
"""

from collections.abc import Hashable, Iterable
from fractions import Fraction
from functools import lru_cache

from .algebra import (
    Factor,
    Factors,
    Term,
    addends,
    even,
    exponent_of,
    is_sum,
    key,
    monomial_key,
    nonnegative,
    positive,
    product_of,
    ratio,
    rational,
    settle,
    split,
    sum_of,
)
from .evaluate import apply, number
from .piecewise import FLIPPED, decided, has_zero_arm, implied, logistic_argument, may_be_infinite, single_where
from .positional import whole_function
from .primitives import PRIMITIVES
from .traverse import is_number, rebuild, variables
from .values import ZERO, Binary, Call, Compare, Const, Expr, ExprError, Logic, Neg, Read, Var

PASSES = 20  # known expressions need a few passes; the limit stops rules that undo each other


def simplify(expr: Expr) -> Expr:
    """Returns the simplified expression. `simplify(simplify(e)) == simplify(e)`.

    Raises ExprError if the expression divides by zero or overflows.
    """
    for _ in range(PASSES):
        before, expr = expr, _once(expr)
        if expr == before:
            break
    return expr


@lru_cache(maxsize=1 << 14)
def _once(expr: Expr) -> Expr:
    match expr:
        case Neg(a):
            return product((Const(-1), _once(a)))
        case Binary("+", a, b):
            return add((_once(a), _once(b)))
        case Binary("-", a, b):
            return add((_once(a), product((Const(-1), _once(b)))))
        case Binary("*", a, b):
            return product((_once(a), _once(b)))
        case Binary("/", a, b):
            return _product(*ratio(_once(a), _once(b)))
        case Binary("**", a, b):
            return power(_once(a), exponent_of(number(b)))
        case Binary("//" | "%" as op, a, b):
            a, b = _once(a), _once(b)
            return Binary(op, a, b) if variables(a) else _constant(op, number(a), number(b))
        case Read() | Logic() | Compare():
            return rebuild(expr, _once)
        case Call("where", (Compare() as condition, a, b)):
            return where(compare(condition.op, _once(condition.a), _once(condition.b)), _once(a), _once(b))
        case Call(name, args):
            return call(name, tuple(_once(arg) for arg in args))
    return expr


def add(parts: Iterable[Expr]) -> Expr:
    """Builds a sum. Like terms are collected. Calls of `where` with the same condition are merged."""
    total: dict[Hashable, Term] = {}
    for part in parts:
        for coefficient, factors in addends(part):
            before, first = total.get(monomial_key(factors), (Fraction(0), factors))
            total[monomial_key(factors)] = (settle(before + coefficient), first)
    terms = [term for term in total.values() if term[0]]
    for index, (coefficient, factors) in enumerate(terms):
        choice = single_where(factors)
        if choice is None:
            continue
        for other, (scale, more) in enumerate(terms[index + 1 :], index + 1):
            second = single_where(more)
            if second is not None and key(second.args[0]) == key(choice.args[0]):
                arms = (add((times(coefficient, choice.args[arm]), times(scale, second.args[arm]))) for arm in (1, 2))
                merged = where(choice.args[0], *arms)
                rest = [product_of(*term) for place, term in enumerate(terms) if place not in (index, other)]
                return add((*rest[:index], merged, *rest[index:]))
    return sum_of(terms)


def times(coefficient: Fraction, expr: Expr) -> Expr:
    factor, factors = split(expr)
    return _product(settle(coefficient * factor), factors)


def product(parts: Iterable[Expr]) -> Expr:
    """Builds a product. Powers of the same base are collected, and piecewise factors with the same condition are
    merged."""
    coefficient = Fraction(1)
    factors: Factors = ()
    for part in parts:
        factor, more = split(part)
        coefficient, factors = settle(coefficient * factor), factors + more
    return _product(coefficient, factors)


def _product(coefficient: Fraction, factors: Factors) -> Expr:
    if not coefficient:
        return ZERO
    collected: dict[Hashable, Factor] = {}
    for base, exponent in factors:
        first, before = collected.get(key(base), (base, Fraction(0)))
        collected[key(base)] = (first, before + exponent)
    merged = tuple(factor for factor in collected.values() if factor[1])
    plain = tuple((_under_even_power(base) if even(exponent) else base, exponent) for base, exponent in merged)
    if plain != merged:
        return _product(coefficient, plain)
    sigmoids = _with_sigmoid(merged)
    if sigmoids != merged:
        return _product(coefficient, sigmoids)
    return _merge_pieces(coefficient, merged) or product_of(coefficient, merged)


def _with_sigmoid(factors: Factors) -> Factors:
    """Rewrites 1 / (1 + exp(u)) as sigmoid(-u), and exp(u) * sigmoid(-u) as sigmoid(u). The sigmoids do not
    overflow."""
    changed = list(factors)
    for place, (base, exponent) in enumerate(changed):
        u = logistic_argument(base) if exponent < 0 and exponent.denominator == 1 else None
        if u is not None:
            changed[place] = (call("sigmoid", (times(Fraction(-1), u),)), -exponent)
    for place, (base, exponent) in enumerate(changed):
        match base:
            case Call("exp", (u,)) if exponent > 0 and exponent.denominator == 1:
                mirror = call("sigmoid", (times(Fraction(-1), u),))
                meets = next((e for other, e in changed if key(other) == key(mirror)), Fraction(0))
                shared = min(exponent, meets)
                if shared > 0 and shared.denominator == 1:
                    changed[place] = (base, exponent - shared)
                    return (*changed, (mirror, -shared), (call("sigmoid", (u,)), shared))
    return tuple(changed)


def _under_even_power(base: Expr) -> Expr:
    match base:
        case Call("abs", (inner,)):
            return inner
    return base


def power(base: Expr, exponent: Fraction) -> Expr:
    """Builds `base ** exponent`. Applies the exponent to each factor of `base` for which this is valid.

    A fractional exponent applies to each factor that cannot be negative. The other factors stay in one power. If a
    factor is 0, the result is 0, not NaN, although the power of another factor may be undefined.
    """
    if isinstance(base, Call) and base.function == "exp":
        return call("exp", (times(exponent, base.args[0]),))
    coefficient, factors = split(base)
    if not factors and exponent.denominator != 1:
        return _constant("**", float(coefficient), float(exponent))
    if not coefficient and exponent < 0:
        raise ExprError(f"{base ** float(exponent)} divides by zero")
    if exponent.denominator == 1:
        scale = Fraction(_exact(coefficient, exponent.numerator))
        return _product(settle(scale), tuple((inner, e * exponent) for inner, e in factors))
    scale = rational(number(_constant("**", float(abs(coefficient)), float(exponent))))
    # A root is defined only if its base is >= 0
    unsigned = [(inner, e) for inner, e in factors if even(e) or e.denominator != 1 or nonnegative(inner)]
    signed = [factor for factor in factors if factor not in unsigned]
    zeros: list[Expr] = []
    if coefficient < 0 or signed:
        zeros = [_magnitude(inner, e) for inner, e in unsigned if e > 0 and not positive(inner)]
    if coefficient < 0 and not signed:  # the power is defined only where a factor is 0
        if not zeros:
            return _constant("**", -1.0, float(exponent))
        signed, zeros = unsigned, []
        unsigned = []
    spread = [(_magnitude(inner, e), e * exponent) for inner, e in unsigned]
    if signed:
        spread.append((product_of(Fraction(-1 if coefficient < 0 else 1), signed), exponent))
    result = _product(scale, tuple(spread))
    for zero in zeros:
        result = where(compare(">", zero, ZERO), result, ZERO)
    return result


def _magnitude(inner: Expr, exponent: Fraction) -> Expr:
    return call("abs", (inner,)) if even(exponent) and not nonnegative(inner) else inner


def _exact(value: Fraction, exponent: int) -> Fraction:
    if abs(exponent) <= 8:
        return value**exponent
    return rational(apply("**", float(value), float(exponent)))


def _constant(name: str, *values: float) -> Const:
    return Const(apply(name, *values))


def _merge_pieces(coefficient: Fraction, factors: Factors) -> Expr | None:
    """Moves factors of a product into both arms of a `where` that is also a factor. Returns None if there is no `where`
    into which factors can move.

    If an arm of the `where` is 0, all factors are moved, because the arm that is 0 does not compute the factors. If no
    arm is 0, only the factors that the condition of the `where` simplifies are moved.
    """
    for base, exponent in factors:
        match base:
            case Call("where", (Compare() as condition, a, b)):
                if not decided((base, exponent), condition, short=True):
                    continue
                unsafe = may_be_infinite(factors)
                zero = ZERO in (a, b) or (unsafe and (has_zero_arm(a) or has_zero_arm(b)))
                short = not is_sum(a) and not is_sum(b)
                scale = coefficient if zero or short else Fraction(1)
                taken = [factor for factor in factors if zero or decided(factor, condition, short)]
                if len(taken) == 1 and scale == 1 and exponent == 1:
                    continue
                arms: list[Expr] = [ZERO, ZERO]
                for place, (arm, truth) in enumerate(((a, True), (b, False))):
                    if arm != ZERO:
                        parts = (power(assume(inner, condition, truth), e) for inner, e in taken)
                        arms[place] = times(scale, product(parts))
                rest = product_of(coefficient / scale, [factor for factor in factors if factor not in taken])
                return product((rest, where(condition, *arms)))
    return None


def call(name: str, args: tuple[Expr, ...]) -> Expr:
    """Builds a call of any function except `where`, with simplified arguments."""
    if all(map(is_number, args)) and (name in PRIMITIVES or whole_function(name)):
        return _constant(name, *map(number, args))
    first = args[0]
    if name == "leaky_relu":
        args = (first, Const(number(args[1])))
    if name == "sqrt":
        return power(first, Fraction(1, 2))
    coefficient, factors = split(first)
    if name in ("relu", "leaky_relu", "abs") and coefficient != 1 and (coefficient > 0 or name == "abs"):
        # Factors out the coefficient: leaky_relu(2 * x, s) is 2 * leaky_relu(x, s).
        return times(abs(coefficient), call(name, (product_of(Fraction(1), factors), *args[1:])))
    match name, args:
        case "relu", (Call("relu" | "exp" | "sigmoid" | "abs", _),):
            return first
        case "abs", (Call("relu" | "exp" | "sigmoid" | "abs" | "sqrt", _),):
            return first
        case "leaky_relu", (_, Const(0.0)):
            return call("relu", (first,))
        case "leaky_relu", (_, Const(1.0)):
            return first
        case "exp", (Call("log", (inner,)),):
            return inner
        case "log", (Call("exp", (inner,)),):
            return inner
        case (("min" | "max"), (a, b)) if key(a) == key(b):
            return a
    return Call(name, args)


def compare(op: str, a: Expr, b: Expr) -> Compare:
    """Builds a condition with the constant on the right. The coefficient of a single term is removed: 2 * u > 0
    becomes u > 0."""
    if is_number(a) and not is_number(b):
        op, a, b = FLIPPED[op], b, a
    if not is_number(a):
        terms = addends(add((a, product((Const(-1), b)))))
        if all(not factors for _, factors in terms):
            return Compare(op, Const(float(sum(coefficient for coefficient, _ in terms))), ZERO)
        if len(terms) == 1:
            coefficient, factors = terms[0]
            return Compare(op if coefficient > 0 else FLIPPED[op], product_of(Fraction(1), factors), ZERO)
    return Compare(op, a, b)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """Builds a `where` from simplified parts. Constant conditions and equal arms are resolved, and relu and leaky_relu
    are recognized."""
    assert isinstance(condition, Compare)
    if is_number(condition):
        return a if number(condition) else b
    a, b = assume(a, condition, True), assume(b, condition, False)
    if key(a) == key(b):
        return a
    match condition:
        case Compare(">", u, Const(0.0)):
            coefficient, factors = split(a)
            _, condition_factors = split(u)
            if b == ZERO and monomial_key(factors) == monomial_key(condition_factors):
                return times(coefficient, call("relu", (u,)))
            if b == ZERO and len(factors) == 1 and key(factors[0][0]) == key(u) and factors[0][1] > 0:
                return _product(coefficient, ((call("relu", (u,)), factors[0][1]),))
            slope, others = split(b)
            if coefficient == 1 and monomial_key(factors) == monomial_key(condition_factors) == monomial_key(others):
                return call("leaky_relu", (u, Const(float(slope))))
    return Call("where", (condition, a, b))


def assume(expr: Expr, condition: Compare, truth: bool) -> Expr:
    """Simplifies `expr`, given that `condition` has the value `truth`."""
    decided = _decide(expr, condition, truth)
    return expr if decided == expr else simplify(decided)


@lru_cache(maxsize=1 << 14)
def _decide(expr: Expr, condition: Compare, truth: bool) -> Expr:
    match expr, condition:
        case Call("where", (question, a, b)), _:
            answer = implied(question, condition, truth)
            if answer is not None:
                return _decide(a if answer else b, condition, truth)
        case Call("relu", (u,)), Compare(">", v, Const(0.0)) if key(u) == key(v):
            return u if truth else ZERO
        case Call("leaky_relu", (u, slope)), Compare(">", v, Const(0.0)) if key(u) == key(v):
            return u if truth else slope * u
        case Call("abs", (u,)), Compare(">", v, Const(0.0)) if truth and key(u) == key(v):
            return u
        case Call("min" | "max" as name, (a, b)), _:
            for op, larger, smaller in (
                (">", a, b),
                ("<", b, a),
            ):  # a tie is not decided, because a tie splits the gradient between the arguments
                if implied(compare(op, a, b), condition, truth):
                    return _decide(larger if name == "max" else smaller, condition, truth)
        case ((Const() | Var()), _):
            return expr
    return rebuild(expr, lambda part: _decide(part, condition, truth))
