"""Prints expressions as source text: Torch, Triton and CUDA C++."""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import sqrt
from typing import ClassVar

from .algebra import Factors, product_of, rational, split
from .evaluate import number
from .parse import parse
from .values import (
    ATOM,
    CHOICE,
    COMPARE,
    POWER,
    PRODUCT,
    UNARY,
    ZERO,
    Binary,
    Call,
    Compare,
    Const,
    Expr,
    ExprError,
    Neg,
    Printer,
    plain,
    rebuild,
    substitute,
    variables,
)

LONGEST_PRODUCT = 16  # largest integer power that prints as a product in languages without a power operator
LARGEST_FLOAT = 3.4028234663852886e38


def torch_text(expr: Expr, names: Mapping[str, str] | None = None) -> str:
    """Returns Python source over `torch` and `F` (torch.nn.functional), such as `F.leaky_relu(x, 0.5) ** 2`.

    `names` maps variables to source text, which is parenthesized if necessary. Variables are tensors that broadcast,
    and the result has their dtype.
    """
    return _Torch(names or {}).text(decided(expr))


def triton_text(expr: Expr, names: Mapping[str, str] | None = None) -> str:
    """Returns Triton source over `tl`. Variables are fp32 tensors.

    The text is finite where the function is: tanh prints as 2 sigmoid(2 x) - 1, and gelu_tanh as a sigmoid. NaN stays
    NaN, as in Torch. Raises ExprError if the text is too long: an argument is repeated for each use in a definition.
    """
    return _Triton(names or {}).text(decided(expr))


def cuda_text(expr: Expr, names: Mapping[str, str] | None = None) -> str:
    """Returns a CUDA C++ device expression. Variables are `float`. NaN stays NaN, as in Torch.

    Raises ExprError if a constant exceeds the range of float, or if the text is too long.
    """
    return _Cuda(names or {}).text(decided(expr))


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
    """Returns True if source text never needs parentheses: a name, member, call, subscript, or parenthesized text."""
    depth = 0
    for character in text:
        if not depth and not re.match(r"[\w.(\[]", character):
            return False
        depth += (character in "([") - (character in ")]")
    return True


class _Target(Printer):
    """Common base of the printers of the three target languages. Floats print with a decimal point or exponent."""

    functions: ClassVar[Mapping[str, str]] = {}
    definitions: ClassVar[Mapping[str, Expr]] = {}  # functions that the language lacks, by those that it has

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names

    def write(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Neg(Binary("*" | "/" as op, a, b)):
                return self.write(Binary(op, -a, b))  # -2 * x instead of -(2 * x)
            case Call(function, args) if function in self.definitions:
                return self.write(substitute(self.definitions[function], dict(zip("xs", args, strict=False))))
        return super().write(expr)

    def constant(self, value: float) -> str:
        return repr(value)

    def variable(self, name: str) -> tuple[str, int]:
        text = self.names.get(name, name)
        return (text, ATOM) if is_primary(text) else (f"({text})", ATOM)

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        return f"{self.functions[function]}({', '.join(self.text(arg) for arg in args)})", ATOM


class _Torch(_Target):
    functions: ClassVar = {
        "relu": "F.relu", "leaky_relu": "F.leaky_relu", "gelu": "F.gelu", "gelu_tanh": "F.gelu",
        "silu": "F.silu", "sigmoid": "torch.sigmoid", "tanh": "torch.tanh", "exp": "torch.exp",
        "log": "torch.log", "sqrt": "torch.sqrt", "erf": "torch.erf", "abs": "torch.abs",
        "min": "torch.minimum", "max": "torch.maximum", "where": "torch.where",
    }  # fmt: skip

    def side(self, expr: Expr) -> str:
        return plain(expr.value) if isinstance(expr, Const) else super().side(expr)

    def power(self, base: Expr, exponent: Expr) -> tuple[str, int]:
        return f"{self.text(base, ATOM)} ** {plain(number(exponent))}", POWER

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        texts = [self.text(arg) for arg in args]
        if function == "gelu_tanh":
            texts.append("approximate='tanh'")
        # torch.maximum does not accept a number (and torch.clamp has another gradient at ties). torch.where of two
        # numbers returns a tensor of the default dtype.
        match function, args:
            case (("min" | "max"), (a, b)) if not variables(b):
                texts[1] = self.full(a, texts[1])
            case (("min" | "max"), (a, b)) if not variables(a):
                texts[0] = self.full(b, texts[0])
            case "where", (condition, a, b) if not variables(a) and not variables(b):
                texts[1] = self.full(condition, texts[1])
        return f"{self.functions[function]}({', '.join(texts)})", ATOM

    def full(self, like: Expr, text: str) -> str:
        """Returns a number as a tensor with the dtype of the first variable of `like`."""
        return f"torch.full_like({self.variable(variables(like)[0])[0]}, {text})"


class _Kernel(_Target):
    """Common base for Triton and CUDA C++, which have fewer functions and print powers as products."""

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
        """Prints base ** n for n > 0 through logarithms."""
        if n.is_integer():
            size = Call("exp", ((n - n % 2) * Call("log", (Call("abs", (base,)),)),))
            return self.write(base * size if n % 2 else size)
        return self.write(Call("exp", (n * Call("log", (base,)),)))


class _Triton(_Kernel):
    functions: ClassVar = {
        "exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "erf": "tl.erf", "abs": "tl.abs",
        "sigmoid": "tl.sigmoid", "min": "tl.minimum", "max": "tl.maximum", "where": "tl.where",
    }  # fmt: skip
    definitions: ClassVar = {
        "relu": parse("where(x < 0, 0, x)"),  # false for NaN, so that NaN is returned
        "leaky_relu": parse("where(x > 0, x, s * x)"),
        "gelu": parse("0.5 * x * (1 + erf(0.7071067811865476 * x))"),
        # 0.5 (1 + tanh(z)) is sigmoid(2 z), and 1.5957... is 2 sqrt(2 / pi)
        "gelu_tanh": parse("x * sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x ** 2))"),
        "silu": parse("x * sigmoid(x)"),
        "tanh": parse("2 * sigmoid(2 * x) - 1"),
    }

    def side(self, expr: Expr) -> str:
        return plain(expr.value) if isinstance(expr, Const) else super().side(expr)

    def call(self, function: str, args: tuple[Expr, ...]) -> tuple[str, int]:
        text, strength = super().call(function, args)
        if function in ("min", "max"):  # the default drops a NaN operand
            text = f"{text[:-1]}, propagate_nan=tl.PropagateNan.ALL)"
        return text, strength


# Functions that CUDA C++ lacks, by name, each after those that it calls. They have no branches, so that the compiler
# interleaves many elements, which tanhf and a correctly rounded division prevent. quick_bell and quick_erf have the
# argument s = BELL * z, because exp2f is one instruction. The value and the slope of gelu use the same s, so that the
# compiler shares one erf and one exp between them.
CUDA_FUNCTIONS: Mapping[str, str] = {
    "larger": """\
// The larger of two numbers, NaN where one is; fmaxf would drop it.
__device__ inline float larger(float a, float b) { return a < b || b != b ? b : a; }""",
    "smaller": """\
// The smaller of two numbers, NaN where one is.
__device__ inline float smaller(float a, float b) { return a > b || b != b ? b : a; }""",
    "quick_sigmoid": """\
// 1 / (1 + exp(-x)) within 4 ulp, without the branch of an exactly rounded division.
__device__ inline float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }""",
    "quick_bell": """\
// exp(-z * z) of s = 1.2011224 z.
__device__ inline float quick_bell(float s) { return exp2f(-s * s); }""",
    "quick_erf": """\
// erf(z) of s = 1.2011224 z, within 5e-7 (Abramowitz and Stegun, section 7.1); erff takes far more registers.
__device__ inline float quick_erf(float s) {
  float const t = __fdividef(1.0f, 1.0f + 0.272737481f * fabsf(s));
  float const high = -0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f));
  return copysignf(1.0f - t * (0.254829592f + t * high) * quick_bell(s), s);
}""",
}
CALLED = {"quick_erf": ("quick_bell",)}
BELL = 1.2011224087864498  # sqrt(log2(e))


def cuda_functions(texts: Iterable[str]) -> str:
    """Returns the definitions of all functions in CUDA_FUNCTIONS that `texts` call, or "" if they call none."""
    written = "\n".join(texts)
    wanted = {name for name in CUDA_FUNCTIONS if f"{name}(" in written}
    wanted |= {called for name in wanted for called in CALLED.get(name, ())}
    return "\n\n".join(text for name, text in CUDA_FUNCTIONS.items() if name in wanted)


class _Cuda(_Kernel):
    # __expf is within 2 + |x| ulp of f32 and quick_erf within 5e-7: far below the rounding of stored values.
    functions: ClassVar = {
        "exp": "__expf", "log": "logf", "sqrt": "sqrtf", "erf": "quick_erf", "abs": "fabsf", "tanh": "tanhf",
        "sigmoid": "quick_sigmoid", "min": "smaller", "max": "larger",
    }  # fmt: skip
    # Each definition shares subexpressions with its derivative, which are computed once if both are needed.
    definitions: ClassVar = {
        **{name: _Triton.definitions[name] for name in ("relu", "leaky_relu", "gelu_tanh", "silu")},
        "gelu": parse("x * (0.5 + 0.5 * erf(0.7071067811865476 * x))"),
    }

    def write(self, expr: Expr) -> tuple[str, int]:
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
                return f"quick_erf({self.text(_scaled(coefficient, factors))})", ATOM
            case "exp", (coefficient, ((base, Fraction(numerator=2, denominator=1)),)) if coefficient < 0:
                return f"quick_bell({self.text(_scaled(sqrt(-coefficient), ((base, Fraction(1)),)))})", ATOM
        return super().call(function, args)


def _scaled(coefficient: float | Fraction, factors: Factors) -> Expr:
    """Returns BELL times a product, with the coefficient rounded to the nine digits of a float."""
    return product_of(rational(float(f"{BELL * float(coefficient):.9g}")), factors)
