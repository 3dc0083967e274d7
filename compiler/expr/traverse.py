"""Functions that walk or rebuild expressions."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from specc.compiler.expr.values import Binary, Call, Compare, Expr, Logic, Neg, Read, Var, children


def rebuild(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Returns `expr` with `change` applied to its direct children."""
    match expr:
        case Call(function, args):
            return Call(function, tuple(change(arg) for arg in args))
        case Binary(op, a, b):
            return Binary(op, change(a), change(b))
        case Compare(op, a, b):
            return Compare(op, change(a), change(b))
        case Logic(op, parts):
            return Logic(op, tuple(map(change, parts)))
        case Read(table, indices):
            return Read(table, tuple(map(change, indices)))
        case Neg(a):
            return -change(a)
    return expr


@lru_cache(maxsize=2**14)
def variables(expr: Expr) -> tuple[str, ...]:
    """Returns the names of the variables without duplicates, in order of first use."""
    if isinstance(expr, Var):
        return (expr.name,)
    return tuple(dict.fromkeys(name for part in children(expr) for name in variables(part)))


def is_number(expr: Expr) -> bool:
    return not isinstance(expr, (Var, Read)) and all(map(is_number, children(expr)))


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replaces all variables named in `values` simultaneously."""
    if isinstance(expr, Var):
        return values.get(expr.name, expr)
    if values.keys().isdisjoint(variables(expr)):
        return expr
    return rebuild(expr, lambda part: substitute(part, values))
