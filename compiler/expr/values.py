"""The expression tree of the pointwise language, and its canonical text.

Expressions are frozen, hashable trees. Arithmetic on expressions (`Var("x") * 2 + 1`) builds trees without
simplification. `==` compares structure. `str(e)` is canonical: `parse(str(e)) == e` for every expression that `parse`
accepts.

A tree has at most LARGEST_TREE nodes. Rules such as derivatives may repeat a subexpression, so a tree may grow
exponentially. The limit bounds the work of every function in this package.
"""

from functools import lru_cache
from math import isfinite
from typing import ClassVar

from ..records import record


class ExprError(ValueError):
    """Raised for an invalid expression. `column` is the 0-based position in the text, and `hint` states how to fix the
    expression."""

    def __init__(self, message: str, column: int = 0, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message, self.column, self.hint = message, column, hint


LARGEST_TREE = 8_000  # maximum number of nodes; every tree that is printed is smaller


class Expr:
    """The base class of expression nodes. Operators accept expressions and numbers.

    `size` is the number of nodes. The hash is cached, because rules look up the same trees many times.
    """

    __slots__ = ("_hash", "size")
    __match_args__: ClassVar[tuple[str, ...]] = ()
    _hash: int
    size: int

    def __post_init__(self) -> None:
        size = 1
        for part in children(self):
            size += part.size
        if size > LARGEST_TREE:
            raise ExprError(f"the expression or its derivative has more than {LARGEST_TREE} parts", hint="split it")
        object.__setattr__(self, "size", size)
        object.__setattr__(
            self, "_hash", hash((type(self).__name__, *(getattr(self, name) for name in self.__match_args__)))
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return _text(self)

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


@record
class Const(Expr):
    """A finite number. -0.0 is stored as 0.0."""

    __hash__ = Expr.__hash__
    value: float

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ExprError(f"the constant {self.value} is not finite")
        object.__setattr__(self, "value", float(self.value) + 0.0)
        Expr.__post_init__(self)


@record
class Var(Expr):
    """A variable: a tensor, or a number that is known at build time."""

    __hash__ = Expr.__hash__
    name: str


@record
class Call(Expr):
    """A call of one of `PRIMITIVES`. The arguments of `where` are (Compare, then, otherwise)."""

    __hash__ = Expr.__hash__
    function: str
    args: tuple[Expr, ...]


@record
class Binary(Expr):
    """`a op b`, where op is one of + - * / ** // %. The exponent of ** has no variables.

    // and % operate on whole numbers and round down. The divisor of // and % is a positive constant.
    """

    __hash__ = Expr.__hash__
    op: str
    a: Expr
    b: Expr


@record
class Neg(Expr):
    """The negation -a. A negative number is a Const instead, so each text has exactly one tree."""

    __hash__ = Expr.__hash__
    a: Expr

    def __post_init__(self) -> None:
        if isinstance(self.a, Const):
            raise ExprError(
                f"the operand of Neg must not be a constant, such as {self.a}", hint="use Const of the negative number"
            )
        Expr.__post_init__(self)


@record
class Compare(Expr):
    """`a op b`, where op is one of < <= > >= == !=. A comparison is valid only as the condition of `where`, or in a
    `Logic`."""

    __hash__ = Expr.__hash__
    op: str
    a: Expr
    b: Expr


@record
class Logic(Expr):
    """The conditions `parts`, joined by the op `and`, `or` or `not`. `not` has one part.

    `and` without parts always holds, and `or` without parts never holds.
    """

    __hash__ = Expr.__hash__
    op: str
    parts: tuple[Expr, ...]


@record
class Read(Expr):
    """The element of a learned table at whole-number indices, one per dim."""

    __hash__ = Expr.__hash__
    table: str
    indices: tuple[Expr, ...]


def as_expr(value: Expr | float) -> Expr:
    return value if isinstance(value, Expr) else Const(value)


@lru_cache(maxsize=2**14)
def _text(expr: Expr) -> str:
    return Printer().text(expr)


def children(expr: Expr) -> tuple[Expr, ...]:
    match expr:
        case Call(_, parts) | Logic(_, parts) | Read(_, parts):
            return parts
        case Binary(_, a, b) | Compare(_, a, b):
            return (a, b)
        case Neg(a):
            return (a,)
    return ()


ZERO, ONE = Const(0.0), Const(1.0)
ALWAYS, NEVER = Logic("and", ()), Logic("or", ())


# Binding strengths of text. A part that binds less strongly than its context requires is parenthesized.
CHOICE, OR, AND, NOT, COMPARE, SUM, PRODUCT, UNARY, POWER, ATOM = range(10)
# Maximum length of a text in characters. In languages without `silu` or `**`, the text of a call repeats its argument,
# so that nested calls grow exponentially.
LONGEST = 20_000


class Printer:
    """Prints the canonical text. Subclasses print the target languages."""

    def __init__(self) -> None:
        self.written: dict[Expr, tuple[str, int]] = {}

    def text(self, expr: Expr, place: int = CHOICE) -> str:
        written = self.written.get(expr)
        if written is None:
            written = self.written[expr] = self.write(expr)
        text, strength = written
        if len(text) > LONGEST:
            raise ExprError(f"the text of the expression has more than {LONGEST} characters", hint="split it")
        return text if strength >= place else f"({text})"

    def write(self, expr: Expr) -> tuple[str, int]:
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
            case Logic(op, parts):
                return self.logic(op, parts)
            case Read(table, indices):
                return self.read(table, indices)
        raise TypeError(f"not an expression: {expr!r}")

    def constant(self, value: float) -> str:
        return plain(value)

    def variable(self, name: str) -> tuple[str, int]:
        return name, ATOM

    def side(self, expr: Expr) -> str:
        return self.text(expr, SUM)

    def right(self, op: str, expr: Expr, strength: int) -> str:
        return self.text(expr, strength + 1)

    def power(self, base: Expr, exponent: Expr) -> tuple[str, int]:
        return f"{self.text(base, ATOM)} ** {self.text(exponent, UNARY)}", POWER

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        return f"{function}({', '.join(self.text(arg) for arg in args)})", ATOM

    def logic(self, op: str, parts: tuple[Expr, ...]) -> tuple[str, int]:
        if not parts:
            return str(op == "and"), ATOM
        if op == "not":
            return f"not {self.text(parts[0], NOT)}", NOT
        strength = AND if op == "and" else OR
        return f" {op} ".join(self.text(part, strength + 1) for part in parts), strength

    def read(self, table: str, indices: tuple[Expr, ...]) -> tuple[str, int]:
        return f"{table}[{', '.join(map(self.text, indices))}]", ATOM


def plain(value: float) -> str:
    """Formats a number without a redundant fraction: 2, not 2.0."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
