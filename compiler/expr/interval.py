"""Interval analysis of whole-number expressions and conditions on boxes of query-key pairs.

A box contains triples of a query position i, a key position j and a head h. Its bounds are `i0 <= i <= i1`,
`j0 <= j <= j1`, `d0 <= i - j <= d1` and `h0 <= h <= h1`. The documents of the queries begin at positions from start0 to
start1.

The analysis is symbolic: bounds are expressions of these variables. Kernels classify tiles by such bounds. A search
over boxes proves that a condition never holds, or finds a pair for which it holds.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, reduce
from heapq import heappop, heappush
from typing import Any, NamedTuple

from ..records import record
from .algebra import addends, const, product_of
from .positional import POSITIONAL, WholeFunction, whole_function
from .primitives import PRIMITIVES
from .simplify import simplify
from .traverse import rebuild, substitute, variables
from .values import ALWAYS, NEVER, ZERO, Binary, Call, Compare, Const, Expr, ExprError, Logic, Var, children

WORK = 50_000  # maximum number of boxes that a proof visits
FAR = float(1 << 30)  # all positions are below this
NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
Interval = tuple[Expr, Expr]


class Undecided(ExprError):
    """Raised if a proof would visit more than WORK boxes."""


def bounds(expr: Expr) -> Interval:
    """Returns a lower and an upper bound of a whole-number expression on a box. Both bounds are expressions.

    The bounds of a linear expression are exact, unless the expression depends on i + j and the box limits i - j.
    """
    low, high = _bounds(simplify(expr))
    return simplify(low), simplify(high)


def over_tile(expr: Expr) -> Expr:
    """Returns `expr` without the variables d0 and d1, for a box that does not limit i - j."""
    ends = {"d0": Var("i0") - Var("j1"), "d1": Var("i1") - Var("j0")}
    return _reduced(substitute(expr, ends))


@lru_cache(maxsize=1 << 12)
def _bounds(expr: Expr) -> Interval:
    split = _mod_as_division(expr)
    direct = _sum_bounds(expr)
    if split == expr:
        return direct
    other = _sum_bounds(simplify(split))
    return _largest(direct[0], other[0]), _smallest(direct[1], other[1])


def _mod_as_division(expr: Expr) -> Expr:
    expr = rebuild(expr, _mod_as_division)
    match expr:
        case Binary("%", a, n):
            return a - n * Binary("//", a, n)
    return expr


def _sum_bounds(expr: Expr) -> Interval:
    """Returns bounds of a simplified sum. min, max and abs are moved out of the sum, so that terms in their arguments
    can cancel other terms."""
    terms = addends(expr)
    for place, (coefficient, factors) in enumerate(terms):
        match factors:
            case ((Call("min" | "max" | "abs" as name, args), Fraction(numerator=1, denominator=1)),):
                rest = [product_of(*term) for k, term in enumerate(terms) if k != place]
                arms = (args[0], -args[0]) if name == "abs" else args
                parts = [_bounds(simplify(_total([*rest, const(coefficient) * arm]))) for arm in arms]
                choose = _smallest if (name == "min") == (coefficient > 0) else _largest
                return choose(*(low for low, _ in parts)), choose(*(high for _, high in parts))
    return _plain_bounds(terms)


def _plain_bounds(terms: Sequence[tuple[Fraction, Any]]) -> Interval:
    rest: dict[Expr, Fraction] = {}
    for coefficient, factors in terms:
        base = product_of(Fraction(1), factors)
        rest[base] = rest.get(base, Fraction(0)) + coefficient
    parts = [_scaled(Const(1.0), Const(1.0), rest.pop(Const(1.0), Fraction(0)))]
    for a, b, (low, high) in _pairs(rest):
        shared = min(abs(rest[a]), abs(rest[b]))
        shared = shared if rest[a] > 0 else -shared
        rest[a], rest[b] = rest[a] - shared, rest[b] + shared
        parts.append(_scaled(low, high, shared))
    parts += [_scaled(*_atom_bounds(base), coefficient) for base, coefficient in rest.items() if coefficient]
    return _total([low for low, _ in parts]), _total([high for _, high in parts])


def _pairs(rest: Mapping[Expr, Fraction]) -> Iterator[tuple[Expr, Expr, Interval]]:
    """Yields pairs of terms `a` and `b` with opposite signs, and bounds of `a - b`. `rest` maps each term to its
    coefficient.

    One pair is i and j, because the box limits i - j. The other pairs are quotients with the same divisor, because the
    difference of the dividends limits the difference of the quotients.
    """
    for a in list(rest):
        for b in list(rest):
            if rest[a] * rest[b] >= 0:
                continue
            match a, b:
                case Var("i"), Var("j"):
                    yield a, b, (Var("d0"), Var("d1"))
                case Binary("//", x, Const(n)), Binary("//", y, Const(m)) if n == m:
                    near = _bounds(simplify(x - y))
                    apart = _atom_bounds(a), _atom_bounds(b)
                    low = _largest(_floor(near[0], n), apart[0][0] - apart[1][1])
                    high = _smallest(_floor(near[1] + (n - 1), n), apart[0][1] - apart[1][0])
                    yield a, b, (low, high)


@lru_cache(maxsize=1 << 12)
def _atom_bounds(expr: Expr) -> Interval:
    match expr:
        case Const():
            return expr, expr
        case Var("i" | "j" | "h" | "start" as name):
            return Var(f"{name}0"), Var(f"{name}1")
        case Var():  # a variable that is itself a bound of a tile
            return ZERO, Const(FAR)
        case Binary("//", a, Const(n)):
            low, high = _bounds(a)
            return _floor(low, n), _floor(high, n)
        case Binary("%", a, Const(n) as divisor):
            low, high = _bounds(a)
            # Both bounds have the same quotient, so the remainder does not wrap around
            same = Compare("==", _floor(low, n), _floor(high, n))
            wrapped = (ZERO, Const(n - 1))
            parts = (
                Call("where", (same, Binary("%", end, divisor), w)) for end, w in zip((low, high), wrapped, strict=True)
            )
            return next(parts), next(parts)
        case Call(name, (first, *constants)) if function := whole_function(name):
            return function.bounds(*_bounds(first), *constants)
        case Binary("*", a, b):
            ends = [x * y for x in _bounds(a) for y in _bounds(b)]
            return _smallest(*ends), _largest(*ends)
        case Binary("**", a, Const(n)) if n.is_integer() and n > 1:
            return _atom_bounds(Binary("*", a, a ** (n - 1) if n > 2 else a))
    raise TypeError(f"not a whole-number expression of positions: {expr}")


def _floor(value: Expr, divisor: float) -> Expr:
    return Binary("//", value, Const(divisor)) if divisor != 1 else value


def _scaled(low: Expr, high: Expr, factor: Fraction) -> Interval:
    ends = (low, high) if factor >= 0 else (high, low)
    return const(factor) * ends[0], const(factor) * ends[1]


def _total(parts: Sequence[Expr]) -> Expr:
    total: Expr = ZERO
    for part in parts:
        total = total + part
    return total


def _largest(*values: Expr) -> Expr:
    return reduce(lambda a, b: a if a == b else Call("max", (a, b)), map(simplify, values))


def _smallest(*values: Expr) -> Expr:
    return reduce(lambda a, b: a if a == b else Call("min", (a, b)), map(simplify, values))


def truth(condition: Expr) -> tuple[Expr, Expr]:
    """Returns two conditions on a box. The first states that `condition` may hold somewhere in the box. The second
    states that `condition` holds everywhere in the box.

    The analysis is sound, but not exact. If the first condition is false, `condition` holds nowhere. If the second is
    true, `condition` holds everywhere.
    """
    some, every = _truth(condition)
    return _reduced(some), _reduced(every)


def _truth(condition: Expr) -> tuple[Expr, Expr]:
    match condition:
        case Logic("not", (part,)):
            some, every = _truth(part)
            return negation(every), negation(some)
        case Logic(op, parts):
            pairs = [_truth(part) for part in parts]
            return Logic(op, tuple(some for some, _ in pairs)), Logic(op, tuple(every for _, every in pairs))
        case Compare("!=", a, b):
            return _truth(Logic("not", (Compare("==", a, b),)))
        case Compare(op, a, b):
            low, high = bounds(a - b)
            below, above = Compare("<=", low, ZERO), Compare(">=", high, ZERO)
            if op == "==":
                every = Logic("and", (Compare(">=", low, ZERO), Compare("<=", high, ZERO)))
                return Logic("and", (below, above)), every
            first, last = (low, high) if op in ("<", "<=") else (high, low)
            return Compare(op, first, ZERO), Compare(op, last, ZERO)
    raise TypeError(f"not a condition: {condition}")


def negation(condition: Expr) -> Expr:
    """Returns the negation of a condition. A comparison is inverted, without `not`."""
    match condition:
        case Compare(op, a, b):
            return Compare(NEGATED[op], a, b)
        case Logic("not", (part,)):
            return part
        case Logic(op, parts):
            return Logic("or" if op == "and" else "and", tuple(map(negation, parts)))
    return Logic("not", (condition,))


def _reduced(expr: Expr) -> Expr:
    """Simplifies a condition or a number: evaluates comparisons of constants, and removes redundant parts."""
    match expr:
        case Compare(op, a, b):
            difference = simplify(a - b)
            if isinstance(difference, Const):
                return ALWAYS if _HOLDS[op](difference.value) else NEVER
            return _balanced(op, difference)
        case Logic("not", (part,)):
            return negation(_reduced(part))
        case Logic(op, parts):
            neutral, absorbing = (ALWAYS, NEVER) if op == "and" else (NEVER, ALWAYS)
            flat: list[Expr] = []
            for part in map(_reduced, parts):
                flat += part.parts if isinstance(part, Logic) and part.op == op else (part,)
            distinct = tuple(dict.fromkeys(part for part in flat if part != neutral))
            if absorbing in distinct:
                return absorbing
            return distinct[0] if len(distinct) == 1 else Logic(op, distinct)
    return simplify(expr)


_HOLDS: Mapping[str, Callable[[float], bool]] = {
    "<": lambda x: x < 0, "<=": lambda x: x <= 0, ">": lambda x: x > 0, ">=": lambda x: x >= 0,
    "==": lambda x: x == 0, "!=": lambda x: x != 0,
}  # fmt: skip


def _balanced(op: str, difference: Expr) -> Expr:
    """Returns `difference op 0` with negative terms on the right: `j0 <= i1`, not `j0 - i1 <= 0`."""
    sides: tuple[list[Expr], list[Expr]] = ([], [])
    for coefficient, factors in addends(difference):
        sides[coefficient < 0].append(product_of(abs(coefficient), factors))
    return Compare(op, *(simplify(_total(side)) for side in sides))


@lru_cache(maxsize=1 << 10)
def python_function(expr: Expr, names: tuple[str, ...]) -> Callable[..., int]:
    """Compiles an expression or condition to a Python function of whole numbers with the arguments `names`.

    The source of the function is the canonical text of the expression. This text contains only numbers, operators and
    known names.
    """
    if unknown := set(variables(expr)) - set(names):
        raise ExprError(f"{min(unknown)} has no value")
    functions = {name: entry.value for name, entry in POSITIONAL.items() if isinstance(entry, WholeFunction)}
    known: dict[str, Any] = {"where": PRIMITIVES["where"].value, **functions}
    function: Callable[..., int] = eval(f"lambda {', '.join(names)}: {expr}", known)
    return function


BOX = ("i0", "i1", "j0", "j1", "d0", "d1", "h0", "h1")


@record
class Box:
    """Inclusive bounds of i, j, i - j and h."""

    i0: int
    i1: int
    j0: int
    j1: int
    d0: int
    d1: int
    h0: int
    h1: int

    @staticmethod
    def all(positions: int, heads: int) -> "Box":
        last = positions - 1
        return Box(0, last, 0, last, -last, last, 0, heads - 1)

    @property
    def values(self) -> tuple[int, ...]:
        return self.i0, self.i1, self.j0, self.j1, self.d0, self.d1, self.h0, self.h1

    def tight(self) -> "Box | None":
        """Returns the smallest box with all pairs and heads of this box. Returns None if this box is empty."""
        d0, d1 = max(self.d0, self.i0 - self.j1), min(self.d1, self.i1 - self.j0)
        i0, i1 = max(self.i0, self.j0 + d0), min(self.i1, self.j1 + d1)
        j0, j1 = max(self.j0, self.i0 - d1), min(self.j1, self.i1 - d0)
        if i0 > i1 or j0 > j1 or d0 > d1 or self.h0 > self.h1:
            return None
        return Box(i0, i1, j0, j1, d0, d1, self.h0, self.h1)

    def halves(self, sides: Collection[str]) -> "tuple[Box, Box]":
        """Splits the box along the longest of the given sides. The side i - j is split at 0 if both signs occur. The
        half with the smaller numbers comes first."""
        signs = "d" in sides and self.d0 < 0 <= self.d1
        side = "d" if signs else max(sides, key=lambda name: (self.length(name), name))
        low, high = f"{side}0", f"{side}1"
        middle = -1 if signs else (getattr(self, low) + getattr(self, high)) // 2
        first, second = replace(self, **{high: middle}), replace(self, **{low: middle + 1})
        return (second, first) if side == "d" and self.d0 < 0 else (first, second)

    def length(self, side: str) -> int:
        length: int = getattr(self, f"{side}1") - getattr(self, f"{side}0")
        return length


class Question(NamedTuple):
    """A comparison, compiled to two functions of the bounds of a box. `some` returns whether the comparison may hold in
    the box. `every` returns whether the comparison holds in the whole box. `sides` names the variables whose bounds the
    comparison depends on: `i`, `j`, `h`, or `d` for i - j."""

    some: Callable[..., int]
    every: Callable[..., int]
    sides: tuple[str, ...]

    @staticmethod
    def of(comparison: Expr) -> "Question":
        parts = truth(comparison)
        read = {name for part in parts for name in variables(part)}
        sides = tuple(side for side in "dijh" if {f"{side}0", f"{side}1"} & read)
        some, every = (python_function(part, BOX) for part in parts)
        return Question(some, every, sides)


class Search(NamedTuple):
    """A condition of i, j and h, compiled for a search over boxes."""

    some: Callable[..., int]
    every: Callable[..., int]
    questions: tuple[Question, ...]

    @staticmethod
    def of(condition: Expr) -> "Search":
        some, every = (python_function(part, BOX) for part in truth(condition))
        comparisons = dict.fromkeys(part for part in atoms(condition) if isinstance(part, Compare))
        return Search(some, every, tuple(map(Question.of, comparisons)))

    def parts(self, box: Box) -> tuple[Box, ...]:
        """Splits a box in two, and returns the halves in which the condition may hold, as tight boxes. If the condition
        holds everywhere in the box, returns only the box itself."""
        values = box.values
        if self.every(*values):
            return (box,)
        open_questions = (q for q in self.questions if q.some(*values) and not q.every(*values))
        sides = next(([side for side in q.sides if box.length(side)] for q in open_questions), [])
        halves = (half.tight() for half in box.halves(sides or [side for side in "dijh" if box.length(side)]))
        return tuple(half for half in halves if half is not None and self.some(*half.values))


def example(condition: Expr, positions: int, heads: int = 1, work: int = WORK) -> tuple[int, int, int] | None:
    """Returns i, j and h for which a condition holds, or None if the condition never holds.

    Args:
        condition: The condition of i, j and h.
        positions: The number of positions. i and j are less than this number.
        heads: The number of heads. h is less than this number.
        work: The maximum number of boxes that the search visits.

    Returns:
        (i, j, h), or None.

    Raises:
        Undecided: If the search does not end within `work` boxes.
    """
    search = Search.of(condition)
    waiting = [box] if (box := Box.all(positions, heads)) and search.some(*box.values) else []
    for _ in range(work):
        if not waiting:
            return None
        box = waiting.pop()
        parts = search.parts(box)
        if parts == (box,):
            return box.i0, max(box.j0, box.i0 - box.d1), box.h0
        waiting += reversed(parts)
    raise Undecided(f"the expression is too complex: a proof about it needs more than {work:,} boxes of positions")


def largest_distance(condition: Expr, positions: int, heads: int = 1) -> int | None:
    """Returns the largest i - j for which a condition holds. Returns None if the condition never holds. Positions are
    less than `positions`, and heads are less than `heads`.

    Raises:
        Undecided: If the search visits WORK boxes of query-key pairs without a result.
    """
    search = Search.of(condition)
    box = Box.all(positions, heads)
    waiting = [(-box.d1, 0, box)] if search.some(*box.values) else []
    for count in range(1, WORK):
        if not waiting:
            return None
        _, _, box = heappop(waiting)
        parts = search.parts(box)
        if parts == (box,):
            return box.d1
        for place, part in enumerate(parts):
            heappush(waiting, (-part.d1, -2 * count - place, part))
    raise Undecided(f"the expression is too complex: a proof about it needs more than {WORK:,} boxes of positions")


def atoms(expr: Expr) -> Iterator[Expr]:
    yield expr
    for part in children(expr):
        yield from atoms(part)
