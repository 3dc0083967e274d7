"""Parses text to an expression with Python's grammar (`ast`) and an allowlist of node types.

Python evaluates nothing.
"""

import ast
import warnings
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

from .evaluate import apply
from .primitives import PRIMITIVES
from .values import Binary, Call, Compare, Const, Expr, ExprError, Var

LONGEST = 500  # maximum length in characters
DEEPEST = 64  # maximum levels of nesting
LARGEST_EXPONENT = 64.0

OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**",
}  # fmt: skip
COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip

# Function names from other languages, and the equivalent here.
ELSEWHERE = {
    "swish": "write silu(x)", "maximum": "write max(a, b)", "minimum": "write min(a, b)",
    "pow": "write x ** n",
    "square": "write x ** 2", "softcap": "write c * tanh(x / c)",
    "swiglu": "write silu(gate) * x", "geglu": "write gelu(gate) * x",
    "clamp": "write min(max(x, low), high)",
}  # fmt: skip


def parse(text: str, variables: Collection[str] | None = None) -> Expr:
    """Parses one expression.

    `variables` are the allowed variable names; None allows any identifier that is not a function name. Raises
    ExprError, with the column and a hint, if the text is outside the language, too long or too deeply nested, or if it
    has a constant that is not finite.
    """
    return _written(text, None if variables is None else frozenset(variables))


@lru_cache(maxsize=4096)  # a build parses the same few texts thousands of times; expressions are immutable
def _written(text: str, variables: Collection[str] | None) -> Expr:
    return _parse(text, variables, LONGEST, DEEPEST, LARGEST_EXPONENT)


@lru_cache(maxsize=4096)
def reread(text: str) -> Expr:
    """Parses text that this package printed.

    Its limits are wider, because derivatives exceed those for written text.
    """
    return _parse(text, None, 40 * LONGEST, 8 * DEEPEST, 2 * LARGEST_EXPONENT)


def _parse(text: str, variables: Collection[str] | None, longest: int, deepest: int, largest_exponent: float) -> Expr:
    if len(text) > longest:
        raise ExprError(
            f"the expression has {len(text)} characters; it may have at most {longest}", longest, "split it"
        )
    text = text.translate({ord(space): " " for space in "\t\r\n"})
    _scan(text, deepest)
    try:
        with warnings.catch_warnings():
            # Python warns about `1if`, which the allowlist rejects. The parentheses permit leading blanks.
            warnings.simplefilter("ignore")
            tree = ast.parse(f"({text})", mode="eval")
    except SyntaxError as error:
        column = min(max((error.offset or 2) - 2, 0), len(text))
        raise ExprError(f"not an expression: {error.msg}", column) from None
    except (ValueError, MemoryError, RecursionError):
        raise ExprError("not an expression that Python can read") from None
    return _Reader(variables, deepest, largest_exponent).read(tree.body, 1)[0]


def _scan(text: str, deepest: int) -> None:
    """Raises ExprError for text that Python's tokenizer would normalize, drop, or nest without limit."""
    if not text.strip():
        raise ExprError("the expression is empty", hint="write x for the identity")
    opened: list[int] = []
    for column, character in enumerate(text):
        if not " " <= character <= "~" or character in "#\\":
            raise ExprError(f"the character {character!a} is not part of the language", column, "write it in ASCII")
        if character == "(":
            opened.append(column)
        if character == ")" and not opened:
            raise ExprError("this parenthesis has no opening parenthesis", column)
        if character == ")":
            opened.pop()
        if len(opened) > deepest:
            raise ExprError(f"nested more than {deepest} deep", column, "split the expression")
    if opened:
        raise ExprError(
            "this parenthesis is not closed",
            opened[-1],
            "close it; within { } or [ ], put an expression with commas in quotes",
        )


class _Reader:
    """Converts `ast` nodes to expressions. Each result comes with its value if it has no variables, else None."""

    def __init__(self, variables: Collection[str] | None, deepest: int, largest_exponent: float) -> None:
        self.deepest, self.largest_exponent = deepest, largest_exponent
        self.variables = variables

    def read(self, node: ast.expr, depth: int) -> tuple[Expr, float | None]:
        if depth > self.deepest:
            fail(f"nested more than {self.deepest} deep", node, "split the expression")
        match node:
            case ast.Constant(value=bool() | str() | bytes() | complex() | None):
                fail(f"{node.value!r} is not a number", node)
            case ast.Constant(value=int() | float() as literal):
                try:
                    constant = Const(float(literal))
                except (OverflowError, ExprError):
                    fail("the constant is not finite", node)
                return constant, constant.value
            case ast.Name(id=name):
                return self.name(name, node), None
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.read(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner, value = self.read(operand, depth + 1)
                return -inner, None if value is None else -value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                a, b = self.read(left, depth + 1), self.read(right, depth + 1)
                symbol = OPERATORS[type(op)]
                if symbol == "**":
                    self.check_exponent(b[1], right)
                return Binary(symbol, a[0], b[0]), fold(symbol, (a[1], b[1]), node)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                return self.call(name, args, keywords, node, depth)
            case ast.Compare():
                fail("a comparison is only valid as the condition of where", node, "write where(x > 0, a, b)")
            case ast.BoolOp() | ast.IfExp() | ast.UnaryOp(op=ast.Not()):
                fail("and, or, not and if are not part of the language", node, "nest where(x > 0, a, b)")
            case ast.Tuple():
                fail("a comma is only valid between the arguments of a function", node)
        fail(
            f"{describe(node)} is not part of the language",
            node,
            "use numbers, names, + - * / ** and functions",
        )

    def name(self, name: str, node: ast.expr) -> Expr:
        if name in PRIMITIVES:
            fail(f"{name} is a function", node, f"write {PRIMITIVES[name].example}")
        if self.variables is not None and name not in self.variables:
            known = sorted(self.variables)
            fail(
                f"unknown variable {name}",
                node,
                suggest(name, known) or f"choose from {', '.join(known) or 'none'}",
            )
        return Var(name)

    def call(
        self, name: str, args: list[ast.expr], keywords: list[ast.keyword], node: ast.expr, depth: int
    ) -> tuple[Expr, float | None]:
        primitive = PRIMITIVES.get(name)
        if primitive is None:
            hint = ELSEWHERE.get(name) or suggest(name, PRIMITIVES) or f"choose from {', '.join(sorted(PRIMITIVES))}"
            fail(f"unknown function {name}", node, hint)
        example = f"write {primitive.example}"
        if keywords:
            fail(f"{name} takes no named arguments", keywords[0].value, example)
        if len(args) != primitive.arity:
            fail(f"{name} takes {primitive.arity} arguments, not {len(args)}", node, example)
        first = self.condition(args[0], depth + 1) if name == "where" else self.read(args[0], depth + 1)
        read = (first, *(self.read(arg, depth + 1) for arg in args[1:]))
        if primitive.derivative and any(value is None for _, value in read[1:]):
            hint = f"write {primitive.definition}" if primitive.definition else example
            fail(f"the arguments of {name} after the first must be constants", args[1], hint)
        return Call(name, tuple(arg for arg, _ in read)), fold(name, tuple(value for _, value in read), node)

    def condition(self, node: ast.expr, depth: int) -> tuple[Expr, float | None]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                a, b = self.read(left, depth + 1), self.read(right, depth + 1)
                symbol = COMPARISONS[type(op)]
                return Compare(symbol, a[0], b[0]), fold(symbol, (a[1], b[1]), node)
            case ast.Compare(ops=[_, _, *_]):
                fail("comparisons cannot be chained", node, "nest where(x > 0, a, b)")
        fail("the condition of where must be one comparison", node, "write where(x > 0, a, b)")

    def check_exponent(self, value: float | None, node: ast.expr) -> None:
        if value is None:
            fail("the exponent of ** must be a constant", node, "write exp(n * log(x))")
        if abs(value) > self.largest_exponent:
            fail(f"an exponent must be at most {self.largest_exponent:g}", node)


def fold(name: str, values: tuple[float | None, ...], node: ast.expr) -> float | None:
    """Evaluates an operation on constants in floats, whose size is bounded, unlike that of Python integers."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    try:
        return apply(name, *known)
    except ExprError as error:
        fail(error.message, node)


def suggest(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else ""


def describe(node: ast.expr) -> str:
    names = {"Lambda": "lambda", "NamedExpr": ":=", "Attribute": "attribute access", "Subscript": "indexing"}
    operators = {"Mod": "%", "FloorDiv": "//", "MatMult": "@"}
    kind = type(node.op).__name__ if isinstance(node, ast.BinOp) else type(node).__name__
    return names.get(kind) or operators.get(kind) or f"a Python {kind.lower()}"


def fail(message: str, node: ast.expr, hint: str = "") -> NoReturn:
    raise ExprError(message, max(node.col_offset - 1, 0), hint)
