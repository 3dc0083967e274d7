"""Converts formulas of a spec to Python: `1/sqrt(layer + 1)` becomes `1 / math.sqrt(layer + 1)`."""

from specc.compiler.expr import Expr, ExprError, parse
from specc.compiler.expr.values import ATOM, CHOICE, Printer

MATH = frozenset({"sqrt", "exp", "log", "tanh", "sin", "cos", "erf"})
BUILTIN = frozenset({"abs", "max", "min"})


class _Python(Printer):
    """Prints expressions with Python's function calls."""

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        if function not in MATH | BUILTIN:
            raise ExprError(f"{function} is not a function of Python's math")
        name = f"math.{function}" if function in MATH else function
        return f"{name}({', '.join(self.text(arg, CHOICE) for arg in args)})", ATOM


def python_formula(text: str) -> str:
    """Returns Python that computes the formula. The result is empty if `text` is empty, or if Python's math module
    lacks a function of the formula."""
    if not text:
        return ""
    try:
        return _Python().text(parse(text))
    except ExprError:
        return ""
