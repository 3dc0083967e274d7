"""The values of the pointwise language, and their canonical text.

An expression is a tree of frozen, hashable values. Arithmetic on them (`Var("x") * 2 + 1`) builds trees and
never simplifies; `==` compares structure, as a value should. `str(e)` is canonical: `parse(str(e)) == e`
for what `parse` accepts.

A tree has at most LARGEST_TREE nodes. Rules such as those of derivatives may repeat a part, so that nested ones grow
exponentially; the bound on what they build bounds the work of every function here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

# Arguments each function takes. leaky_relu's second is a constant, where's first a comparison.
FUNCTIONS: Mapping[str, int] = {
    "relu": 1, "leaky_relu": 2, "gelu": 1, "gelu_tanh": 1, "silu": 1, "sigmoid": 1, "tanh": 1, "exp": 1,
    "log": 1, "sqrt": 1, "erf": 1, "abs": 1, "min": 2, "max": 2, "where": 3,
}  # fmt: skip


class ExprError(ValueError):
    """A fault of an expression (`message`), its place (0-based `column` of the text), and what to do (`hint`)."""

    def __init__(self, message: str, column: int = 0, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message, self.column, self.hint = message, column, hint


LARGEST_TREE = 8_000  # nodes; the longest text that is printed has fewer


class Expr:
    """Base of the values. Operators take expressions and numbers.

    `size` is the number of nodes. The hash is computed once, as rules look up the same trees again and again.
    """

    __slots__ = ("_hash", "size")
    __match_args__: ClassVar[tuple[str, ...]] = ()
    _hash: int
    size: int

    def __post_init__(self) -> None:
        parts = children(self)
        size = 1 + sum(part.size for part in parts)
        if size > LARGEST_TREE:
            raise ExprError(f"the expression or its derivative has more than {LARGEST_TREE} parts", hint="split it")
        object.__setattr__(self, "size", size)
        object.__setattr__(
            self, "_hash", hash((type(self).__name__, *(getattr(self, name) for name in self.__match_args__)))
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return Printer().text(self)

    def __add__(self, other: "Expr | float") -> "Expr":
        return Binary("+", self, as_expr(other))

    def __radd__(self, other: float) -> "Expr":
        return Binary("+", as_expr(other), self)

    def __sub__(self, other: "Expr | float") -> "Expr":
        return Binary("-", self, as_expr(other))

    def __rsub__(self, other: float) -> "Expr":
        return Binary("-", as_expr(other), self)

    def __mul__(self, other: "Expr | float") -> "Expr":
        return Binary("*", self, as_expr(other))

    def __rmul__(self, other: float) -> "Expr":
        return Binary("*", as_expr(other), self)

    def __truediv__(self, other: "Expr | float") -> "Expr":
        return Binary("/", self, as_expr(other))

    def __rtruediv__(self, other: float) -> "Expr":
        return Binary("/", as_expr(other), self)

    def __pow__(self, other: "Expr | float") -> "Expr":
        return Binary("**", self, as_expr(other))

    def __neg__(self) -> "Expr":
        return Const(-self.value) if isinstance(self, Const) else Neg(self)


@dataclass(frozen=True, slots=True)
class Const(Expr):
    """A finite number; -0.0 is stored as 0.0."""

    __hash__ = Expr.__hash__
    value: float

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ExprError(f"the constant {self.value} is not finite")
        object.__setattr__(self, "value", float(self.value) + 0.0)
        Expr.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Var(Expr):
    """A named operand: a tensor, or a number known at build time."""

    __hash__ = Expr.__hash__
    name: str


@dataclass(frozen=True, slots=True)
class Call(Expr):
    """One of `FUNCTIONS` and its arguments; `where` holds (Compare, then, otherwise)."""

    __hash__ = Expr.__hash__
    function: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """`a op b` with op one of + - * / **; the exponent of ** has no variables."""

    __hash__ = Expr.__hash__
    op: str
    a: Expr
    b: Expr


@dataclass(frozen=True, slots=True)
class Neg(Expr):
    """-a; a negative number is a Const instead, so that text and value match one to one."""

    __hash__ = Expr.__hash__
    a: Expr

    def __post_init__(self) -> None:
        if isinstance(self.a, Const):
            raise ExprError(f"Neg of the constant {self.a}", hint="use Const of the negative number")
        Expr.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Compare(Expr):
    """`a op b` with op one of < <= > >= == !=; stands only as the condition of `where`."""

    __hash__ = Expr.__hash__
    op: str
    a: Expr
    b: Expr


def as_expr(value: Expr | float) -> Expr:
    return value if isinstance(value, Expr) else Const(value)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct parts of `expr`, in reading order."""
    match expr:
        case Call(_, args):
            return args
        case Binary(_, a, b) | Compare(_, a, b):
            return (a, b)
        case Neg(a):
            return (a,)
    return ()


ZERO, ONE = Const(0.0), Const(1.0)


def rebuild(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """`expr` with `change` applied to its direct parts."""
    match expr:
        case Call(function, args):
            return Call(function, tuple(change(arg) for arg in args))
        case Binary(op, a, b):
            return Binary(op, change(a), change(b))
        case Compare(op, a, b):
            return Compare(op, change(a), change(b))
        case Neg(a):
            return -change(a)
    return expr


def variables(expr: Expr) -> tuple[str, ...]:
    """Names of the variables, each once, in the order in which they are first read."""
    if isinstance(expr, Var):
        return (expr.name,)
    return tuple(dict.fromkeys(name for part in children(expr) for name in variables(part)))


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """`expr` with every variable named in `values` replaced, all at once."""
    if isinstance(expr, Var):
        return values.get(expr.name, expr)
    return rebuild(expr, lambda part: substitute(part, values))


# How tightly a piece of text binds; what binds less than its place asks for gets parentheses.
CHOICE, COMPARE, SUM, PRODUCT, UNARY, POWER, ATOM = range(7)
LONGEST = 20_000  # characters; a target without `silu` or `**` repeats its argument, which nesting multiplies


class Printer:
    """Prints the canonical text; the printers of the target languages override what they spell otherwise."""

    def __init__(self) -> None:
        self.written: dict[Expr, tuple[str, int]] = {}

    def text(self, expr: Expr, place: int = CHOICE) -> str:
        written = self.written.get(expr)
        if written is None:
            written = self.written[expr] = self.write(expr)
        text, strength = written
        if len(text) > LONGEST:
            raise ExprError(f"the expression prints as more than {LONGEST} characters", hint="split it")
        return text if strength >= place else f"({text})"

    def write(self, expr: Expr) -> tuple[str, int]:
        """Text and how tightly it binds."""
        match expr:
            case Const(value):
                return self.constant(value), ATOM if value >= 0 else UNARY
            case Var(name):
                return self.variable(name)
            case Neg(a):
                return "-" + self.text(a, UNARY), UNARY
            case Compare(op, a, b):
                return f"{self.side(a)} {op} {self.side(b)}", COMPARE
            case Binary("**", a, b):
                return self.power(a, b)
            case Binary(op, a, b):
                strength = SUM if op in "+-" else PRODUCT
                return f"{self.text(a, strength)} {op} {self.right(op, b, strength)}", strength
            case Call(function, args):
                return self.call(function, args)
        raise TypeError(f"not an expression: {expr!r}")

    def constant(self, value: float) -> str:
        return plain(value)

    def variable(self, name: str) -> tuple[str, int]:
        return name, ATOM

    def side(self, expr: Expr) -> str:
        """One side of a comparison."""
        return self.text(expr, SUM)

    def right(self, op: str, expr: Expr, strength: int) -> str:
        """The right operand of + - * /."""
        return self.text(expr, strength + 1)

    def power(self, base: Expr, exponent: Expr) -> tuple[str, int]:
        return f"{self.text(base, ATOM)} ** {self.text(exponent, UNARY)}", POWER

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        return f"{function}({', '.join(self.text(arg) for arg in args)})", ATOM


def plain(value: float) -> str:
    """A number as a person writes it: 2 rather than 2.0."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
