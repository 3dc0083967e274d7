"""Names of epilogues, for files and kernels."""

from .evaluate import number
from .traverse import variables
from .values import Binary, Call, Expr, ExprError, Var, children, plain

LONGEST = 48
HINT = "give the activation a name: `act: {expr: ..., name: ...}`"
OPERATORS = {"+": "add", "-": "sub", "*": "mul", "/": "div"}
POWERS = {2.0: "square", 3.0: "cube", 0.5: "sqrt"}


def name_of(expr: Expr) -> str:
    """Returns the names of the functions and operators in `expr`, in reading order, joined by `_`. The identity has
    the name "".

    A small integer power of a function is a digit (relu2). Other powers are words: square, cube, pow4, pow1p5, powm1.
    Operands, signs, constant factors and constant divisors are omitted: 30 * tanh(x / 30) is tanh, acc * slope is mul,
    silu(gate) * x is silu_mul, 1 / x is div, x + 1 is add.

    Raises ExprError if the name exceeds 48 characters.
    """
    name = "_".join(_words(expr))
    if len(name) > LONGEST:
        raise ExprError(
            f"the name of this expression, {name}, has {len(name)} characters, more than {LONGEST}", hint=HINT
        )
    return name


def _words(expr: Expr) -> list[str]:
    match expr:
        case Call(function, _) if variables(expr):
            return [function, *_parts(expr)]
        case Binary("**", Call(function, _) as base, b) if number(b) in range(2, 10) and variables(base):
            return [f"{function}{plain(number(b))}", *_parts(base)]
        case Binary("**", base, b) if variables(base):
            exponent = number(b)
            word = POWERS.get(exponent) or "pow" + _digits(exponent)
            return [*_words(base), *([word] if exponent != 1 else [])]
        case Binary(op, a, b) if variables(expr):
            silent = (op == "*" and not (variables(a) and variables(b))) or (op == "/" and not variables(b))
            return [*_words(a), *([] if silent else [OPERATORS[op]]), *_words(b)]
    return _parts(expr)


def _digits(exponent: float) -> str:
    """Formats an exponent for a name, with four significant digits: `0p3333` for 1 / 3."""
    return plain(float(f"{exponent:.4g}")).replace(".", "p").replace("-", "m")


def _parts(expr: Expr) -> list[str]:
    if isinstance(expr, Var) or not variables(expr):
        return []
    return [word for part in children(expr) for word in _words(part)]
