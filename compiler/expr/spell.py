"""Prints expressions as source text: Torch, Triton, CUDA C++ and the CuTe DSL."""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import sqrt
from typing import ClassVar

from .algebra import Factors, product_of, rational, split
from .evaluate import number
from .interval import FAR, bounds, negation
from .parse import parse
from .positional import POSITIONAL, whole_function
from .primitives import PRIMITIVES
from .traverse import rebuild, substitute, variables
from .values import (
    ATOM,
    CHOICE,
    COMPARE,
    NOT,
    POWER,
    PRODUCT,
    SUM,
    UNARY,
    ZERO,
    Binary,
    Call,
    Compare,
    Const,
    Expr,
    ExprError,
    Logic,
    Neg,
    Printer,
    Var,
    plain,
)

LONGEST_PRODUCT = 16  # largest integer power that prints as a product in languages without a power operator
LARGEST_FLOAT = 3.4028234663852886e38


def torch_text(expr: Expr, names: Mapping[str, str] | None = None, whole: bool = False) -> str:
    """Returns Python source that calls `torch` and `F` (torch.nn.functional), such as `F.leaky_relu(x, 0.5) ** 2`.

    `names` maps variables to source text. Variables are tensors of one dtype that broadcast. The result has this dtype.
    If `whole` is True, the tensors hold whole numbers, and the expression is a condition or a whole number.
    """
    return _Torch(names or {}, whole).text(decided(expr))


def score_text(expr: Expr, names: Mapping[str, str]) -> str:
    """Returns Python source that computes a score, or a derivative of a score, with Torch. `names` maps variables to
    source text. The variables i, j and h are tensors of whole numbers."""
    return _TorchScore(names, False).text(decided(expr))


def triton_text(expr: Expr, names: Mapping[str, str] | None = None, whole: bool = False) -> str:
    """Returns Triton source that calls `tl`. `names` maps variables to source text. Variables are fp32 tensors. In
    attention, the variables i, j, h and start are int32 instead.

    The text is finite wherever the function is finite: tanh prints as 2 sigmoid(2 x) - 1, and gelu_tanh as a sigmoid.
    NaN stays NaN, as in Torch. With `whole`, the expression is a condition or a whole number. Otherwise, parts of the
    expression may be whole numbers. The operators // and % are exact only for j <= i, because Triton's integer division
    rounds toward 0.

    Raises ExprError if the text is too long. The definition of a function may repeat its argument, so a text can grow
    quickly.
    """
    return _Triton(names or {}, whole).text(decided(expr))


def cuda_text(expr: Expr, names: Mapping[str, str] | None = None) -> str:
    """Returns a CUDA C++ device expression. `names` maps variables to source text. Variables are `float`. NaN stays
    NaN, as in Torch.

    Raises ExprError if a constant exceeds the range of float, or if the text is too long.
    """
    return _Cuda(names or {}).text(decided(expr))


def cute_text(expr: Expr, whole: bool = False, floats: Mapping[str, str] | None = None) -> str:
    """Returns Python source of the CuTe DSL that calls `cute` and `cutlass`.

    Variables are fp32 vectors (`cute.TensorSSA`). In attention, the variables i, j, h and start are int32 instead. For
    min and max, the text calls `smaller` and `larger`. These functions ignore a NaN in the second argument.

    Args:
        expr: The expression.
        whole: Whether the expression is a condition or a whole number.
        floats: The fp32 source text of whole-number variables, for float parts.
    """
    return _Cute({}, whole, floats=floats or {}).text(decided(expr))


@lru_cache(maxsize=1024)
def decided(expr: Expr) -> Expr:
    """Evaluates the parts without variables, because tensor functions do not accept plain numbers."""
    expr = rebuild(expr, decided)
    match expr:
        case Call("where", (condition, a, b)) if not variables(condition):
            return a if number(condition) else b
        case Call() | Binary("**", _, _) if not variables(expr):
            return Const(number(expr))
    return expr


def is_primary(text: str) -> bool:
    """Returns whether source text never needs parentheses: a name, member, call, subscript, or parenthesized text."""
    depth = 0
    for character in text:
        if not depth and not re.match(r"[\w.(\[]", character):
            return False
        depth += (character in "([") - (character in ")]")
    return True


class _Target(Printer):
    """The base class of printers for Torch, for kernels and for the CuTe DSL.

    Floats are printed with a decimal point or an exponent. With `whole`, all numbers are whole, and are printed without
    a decimal point. Otherwise, `inner` is the printer of the whole-number parts of an expression.
    """

    language: ClassVar[str]

    def __init__(self, names: Mapping[str, str], whole: bool = False) -> None:
        super().__init__()
        self.names, self.whole = names, whole
        self.inner: _Target = self if whole else self.of_whole()

    def of_whole(self) -> "_Target":
        return type(self)(self.names, True)

    def write(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Neg(Binary("*" | "/" as op, a, b)):
                return self.write(Binary(op, -a, b))  # -2 * x instead of -(2 * x)
            case Binary("//" | "%", _, _) if not self.whole:
                return self.inner.write(expr)
            case Call(name, args) if function := whole_function(name):
                return (function.text(self, self.language, *args), ATOM) if self.whole else self.inner.write(expr)
        return super().write(expr)

    def constant(self, value: float) -> str:
        return plain(value) if self.whole else repr(value)

    def logic(self, op: str, parts: tuple[Expr, ...]) -> tuple[str, int]:
        if not parts:
            return super().logic(op, parts)
        if op == "not":
            return f"~{self.text(parts[0], ATOM)}", UNARY
        return f" {'&' if op == 'and' else '|'} ".join(self.text(part, ATOM) for part in parts), NOT

    def variable(self, name: str) -> tuple[str, int]:
        text = self.names.get(name, name)
        return (text, ATOM) if is_primary(text) else (f"({text})", ATOM)


class _Torch(_Target):
    language = "torch"

    def variable(self, name: str) -> tuple[str, int]:
        text = self.names.get(name, name)
        return text, ATOM if is_primary(text) else CHOICE  # an argument of a function needs no parentheses

    def side(self, expr: Expr) -> str:
        return plain(expr.value) if isinstance(expr, Const) else super().side(expr)

    def power(self, base: Expr, exponent: Expr) -> tuple[str, int]:
        return f"{self.text(base, ATOM)} ** {plain(number(exponent))}", POWER

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        texts = [self.text(arg) for arg in args]
        # torch.maximum does not accept numbers, and torch.clamp has a different gradient at ties. torch.where of two
        # numbers returns a tensor of the default dtype.
        match function, args:
            case (("min" | "max"), (a, b)) if not variables(b):
                texts[1] = self.full(a, b)
            case (("min" | "max"), (a, b)) if not variables(a):
                texts[0] = self.full(b, a)
            case "where", (condition, a, b) if not variables(a) and not variables(b):
                texts[1] = self.full(condition, a)
        texts += [f"{name}={value!r}" for name, value in PRIMITIVES[function].torch_keywords.items()]
        return f"{PRIMITIVES[function].torch}({', '.join(texts)})", ATOM

    def full(self, like: Expr, value: Expr) -> str:
        """Returns source text of a tensor filled with `value`. The tensor has the dtype of the first variable in
        `like`."""
        return f"torch.full_like({self.variable(variables(like)[0])[0]}, {self.text(value)})"


class _TorchScore(_Torch):
    def full(self, like: Expr, value: Expr) -> str:
        if number(value).is_integer() or not (names := variables(like)) or names[0] not in ("i", "j", "h"):
            return super().full(like, value)
        wide = next((name for name in names if name not in ("i", "j", "h")), "")
        if wide:
            return super().full(Var(wide), value)
        return f"torch.full_like({names[0]}, {self.text(value)}, dtype=torch.get_default_dtype())"


class _Kernel(_Target):
    """The base class for Triton and CUDA C++. These languages have fewer functions than Torch, and no operator for
    powers. Powers are printed as products."""

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        primitive = PRIMITIVES[function]
        spelling: str = getattr(primitive, self.language) or primitive.definition
        if "{" in spelling:
            return spelling.format(*map(self.text, args)), ATOM
        return self.write(substitute(parse(spelling), dict(zip("xs", args, strict=False))))

    def right(self, op: str, expr: Expr, strength: int) -> str:
        if op == "*" and isinstance(expr, Binary) and expr.op == "**":
            return self.text(expr, strength)  # a * x * x, without parentheses
        return super().right(op, expr, strength)

    def power(self, base: Expr, exponent: Expr) -> tuple[str, int]:
        n = number(exponent)
        if n < 0:
            return self.write(1.0 / base**-n)
        if n > LONGEST_PRODUCT or not (2 * n).is_integer():
            return self.general_power(base, n)
        match base:
            case Call("leaky_relu", (u, slope)) if n in range(2, LONGEST_PRODUCT + 1):
                return self.write(Call("where", (Compare(">", u, ZERO), u**n, number(slope) ** n * u**n)))
            case Call("relu", (u,)) if n in range(2, LONGEST_PRODUCT + 1):
                return self.write(Call("where", (Compare("<", u, ZERO), ZERO, u**n)))
        factors = [base] * int(n) + ([Call("sqrt", (base,))] if n % 1 else [])
        if len(factors) > 1:
            return " * ".join(self.text(factor, ATOM) for factor in factors), PRODUCT
        return self.write(factors[0] if factors else Const(1.0))

    def general_power(self, base: Expr, n: float) -> tuple[str, int]:
        """Prints `base` ** n for n > 0 by an exponential and a logarithm, because the target language has no operator
        for powers. Returns the text, and the precedence of its outermost operator."""
        if n.is_integer():
            size = Call("exp", ((n - n % 2) * Call("log", (Call("abs", (base,)),)),))
            return self.write(base * size if n % 2 else size)
        return self.write(Call("exp", (n * Call("log", (base,)),)))


class _Triton(_Kernel):
    language = "triton"

    def __init__(
        self,
        names: Mapping[str, str],
        whole: bool = False,
        ordered: bool = False,
        floats: Mapping[str, str] | None = None,
    ) -> None:
        self.ordered = ordered  # the text need only be correct for j <= i
        self.positions = names
        super().__init__(names if whole else {**names, **(floats or {})}, whole)

    def of_whole(self) -> "_Target":
        return _Triton(self.positions, True, ordered=True)

    def write(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Binary("//" | "%" as op, a, b) if self.whole and not self.nonnegative(a):
                divisor = self.text(b)  # integer division in tl rounds towards 0
                rest = f"{self.text(a, PRODUCT)} % {divisor}"
                if op == "%":
                    return f"({rest} + {divisor}) % {divisor}", PRODUCT
                return f"{self.text(a, PRODUCT)} // {divisor} - ({rest} < 0).to(tl.int32)", SUM
        return super().write(expr)

    def nonnegative(self, expr: Expr) -> bool:
        far = {"i1": FAR, "j1": FAR, "h1": FAR, "start1": FAR, "d1": FAR}
        least = {"i0": 0.0, "j0": 0.0, "h0": 0.0, "start0": 0.0, "d0": 0.0 if self.ordered else -FAR}
        return number(bounds(expr)[0], **far, **least) >= 0

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        text = self.text(args[0])
        if (
            not self.whole
            and PRIMITIVES[function].derivative
            and set(variables(args[0])) <= {"i", "j", "h"}
            and "." not in text
        ):
            return super().call(function, (Const(1.0) * args[0], *args[1:]))  # functions of tl take floats
        return super().call(function, args)

    def side(self, expr: Expr) -> str:
        return plain(expr.value) if isinstance(expr, Const) else super().side(expr)


class _Cute(_Triton):
    """Operators of the CuTe DSL: // rounds down, as in Python, and % has the sign of its left operand, as in C++."""

    language = "cute"

    def of_whole(self) -> "_Target":
        return _Cute(self.positions, True, ordered=True)

    def write(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Binary("//", _, _) if self.whole:
                return _Kernel.write(self, expr)
            case Binary("/", a, Const(value)) if not self.whole:
                return self.write(a * Const(1 / value))
            case Logic("not", (part,)):
                return self.write(negation(part))
        return super().write(expr)

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        match function, args:
            case (("min" | "max"), (a, b)) if not variables(a):
                args = (b, a)
            case "where", (condition, a, b) if not variables(a) and not variables(b):
                return PRIMITIVES["where"].cute.format(
                    self.text(condition), self.full(condition, a), self.text(b)
                ), ATOM
        return super().call(function, args)

    def full(self, like: Expr, value: Expr) -> str:
        dtype = "cutlass.Int32" if self.whole else "cutlass.Float32"
        return f"cute.full_like({self.variable(variables(like)[0])[0]}, {self.text(value)}, {dtype})"


BELL = 1.2011224087864498  # sqrt(log2(e)): exp(-z ** 2) is 2 ** -(BELL * z) ** 2


def cuda_functions(texts: Iterable[str]) -> str:
    """Returns the definitions of the CUDA C++ helpers that `texts` call. The result is empty if the texts call no
    helpers."""
    helpers = {name: text for primitive in PRIMITIVES.values() for name, text in primitive.cuda_helpers.items()}
    calls, definitions = "\n".join(texts), list[str]()
    for name, text in reversed(helpers.items()):  # a helper may call the helpers before it
        if f"{name}(" in calls:
            calls += text
            definitions.insert(0, text)
    return "\n\n".join(definitions)


class _Cuda(_Kernel):
    language = "cuda"

    def write(self, expr: Expr) -> tuple[str, int]:
        if isinstance(expr, Call) and expr.function in POSITIONAL:
            raise ExprError("positions of tokens are not part of this language")
        if isinstance(expr, Neg) and not (isinstance(expr.a, Binary) and expr.a.op in "*/"):
            return "-" + self.text(expr.a, POWER), UNARY  # --x would be a decrement
        return super().write(expr)

    def constant(self, value: float) -> str:
        if abs(value) > LARGEST_FLOAT:
            raise ExprError(f"the constant {plain(value)} does not fit a float")
        return f"{value!r}f"

    def general_power(self, base: Expr, n: float) -> tuple[str, int]:
        return f"powf({self.text(base)}, {self.constant(n)})", ATOM

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        match function, split(args[0]):
            case "where", _:
                condition, a, b = args
                return f"{self.text(condition)} ? {self.text(a, COMPARE)} : {self.text(b)}", CHOICE
            case "erf", (coefficient, factors):
                return super().call("erf", (_scaled(coefficient, factors),))
            case "exp", (coefficient, ((base, Fraction(numerator=2, denominator=1)),)) if coefficient < 0:
                return f"quick_bell({self.text(_scaled(sqrt(-coefficient), ((base, Fraction(1)),)))})", ATOM
        return super().call(function, args)


def _scaled(coefficient: float | Fraction, factors: Factors) -> Expr:
    return product_of(rational(float(f"{BELL * float(coefficient):.9g}")), factors)
