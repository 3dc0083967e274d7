"""Formulas and conditions of whole numbers, such as the index of a layer: `9 - layer`, `layer % 6 == 5`.

A text is parsed with Python's grammar and an allowlist of node types. The text is never evaluated as Python.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import NoReturn

from .values import ExprError

LONGEST = 500  # in characters
LARGEST = 2**31

_ARITHMETIC: Mapping[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def formula_value(text: str, values: Mapping[str, int]) -> int:
    """Returns the value of a whole-number formula with + - * // % and the names in `values`.

    Raises:
        ExprError: If the text is not a formula, divides by 0, or exceeds 2^31.
    """
    return _number(_parsed(text), values)


def condition_holds(text: str, values: Mapping[str, int]) -> bool:
    """Returns whether a condition holds. `values` maps the names in the condition to numbers. A condition consists of
    comparisons of formulas, joined by `and`, `or` and `not`.

    Raises:
        ExprError: If the text is not a condition, divides by 0, or exceeds 2^31.
    """
    return _truth(_parsed(text), values)


def names_in(text: str) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ExprError(f"the text has {len(text)} characters", hint=f"use at most {LONGEST}")
    try:
        return ast.parse(text.strip() and text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        column = max(0, (getattr(error, "offset", None) or 1) - 1)
        hint = "for example `layers - 1`, or the condition `layer % 6 == 5`"
        raise ExprError("this is not a formula", column, hint) from None


def _number(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            result = value
        case ast.Name(id=name):
            if name not in values:
                _refuse(node, f"`{name}` is not a known name here", _known(values))
            result = values[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -_number(inner, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            symbol, compute = _ARITHMETIC[type(op)]
            a, b = _number(left, values), _number(right, values)
            if symbol in ("//", "%") and b == 0:
                _refuse(node, f"`{ast.unparse(node)}` divides by 0", "change the divisor")
            result = compute(a, b)
        case _:
            _refuse(node, f"`{ast.unparse(node)}` is not a whole number", "write whole numbers with + - * // %")
    if abs(result) > LARGEST:
        _refuse(node, f"`{ast.unparse(node)}` exceeds {LARGEST}", "use smaller numbers")
    return result


def _truth(node: ast.expr, values: Mapping[str, int]) -> bool:
    match node:
        case ast.BoolOp(op=op, values=parts):
            truths = [_truth(part, values) for part in parts]  # all operands are evaluated, so that each is checked
            return all(truths) if isinstance(op, ast.And) else any(truths)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _truth(inner, values)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            numbers = [_number(part, values) for part in (left, *others)]
            pairs = zip(ops, numbers, numbers[1:], strict=False)
            return all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
    _refuse(node, f"`{ast.unparse(node)}` is not a condition", "compare numbers, for example `layer >= 9`")


def _known(values: Collection[str]) -> str:
    return f"the names are {', '.join(values)}" if values else "no names are known here"


def _refuse(node: ast.expr, message: str, hint: str) -> NoReturn:
    raise ExprError(message, node.col_offset, hint)
