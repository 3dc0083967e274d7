"""Evaluates expressions: to a float, and to a Torch tensor for the float64 reference of the kernel tests."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .values import Binary, Call, Compare, Const, Expr, ExprError, Neg, Var, plain

if TYPE_CHECKING:
    from torch import Tensor

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip

ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": math.pow,
}  # fmt: skip


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


SCALAR: Mapping[str, Callable[..., float]] = {
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x, slope: x if x > 0 else slope * x,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x * math.sqrt(0.5))),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "erf": math.erf,
    "abs": abs,
    "min": min,
    "max": max,
    "where": lambda condition, a, b: a if condition else b,
}


def apply(name: str, *values: float) -> float:
    """Applies a function, operator or comparison to floats.

    Raises ExprError if the result is undefined or not finite.
    """
    try:
        result = (SCALAR.get(name) or ARITHMETIC.get(name) or COMPARISONS[name])(*values)
    except (ArithmeticError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        shown = [plain(value) for value in values]
        text = f"{name}({', '.join(shown)})" if name in SCALAR else f" {name} ".join(shown)
        raise ExprError(f"{text} is not a finite number")
    return result


def number(expr: Expr, /, **values: float) -> float:
    """Evaluates in double precision: `number(parse("1 / sqrt(layer + 1)"), layer=3) == 0.5`.

    Raises ExprError if a variable has no value, or if the result is undefined or overflows.
    """
    match expr:
        case Const(value):
            return value
        case Var(name):
            if name not in values:
                raise ExprError(f"{name} has no value", hint=f"known are {', '.join(values) or 'none'}")
            return float(values[name])
        case Neg(a):
            return -number(a, **values)
        case Call("where", (condition, a, b)):
            return number(a if number(condition, **values) else b, **values)
        case Binary(name, a, b) | Compare(name, a, b):
            return apply(name, number(a, **values), number(b, **values))
        case Call(name, args):
            return apply(name, *(number(arg, **values) for arg in args))
    raise TypeError(f"not an expression: {expr!r}")


def torch_value(expr: Expr, values: "Mapping[str, Tensor | float]") -> "Tensor":
    """Evaluates with Torch operations, independently of the printers. Differentiable, with Torch's subgradients.

    Shapes broadcast. Constants have the dtype and device of the first floating-point tensor in `values`, else of the
    first tensor, else float64 on the CPU. With float64 values the result is thus a float64 reference, even if integer
    tensors are among the values.
    """
    import torch
    from torch.nn import functional as F

    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    like = [*floats, *tensors, torch.empty((), dtype=torch.float64)][0]
    functions: dict[str, Callable[..., Tensor]] = {
        "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
        "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
        "erf": torch.erf, "abs": torch.abs, "min": torch.minimum, "max": torch.maximum, "where": torch.where,
        "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div,
        "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
    }  # fmt: skip

    def tensor(value: "Tensor | float") -> "Tensor":
        if isinstance(value, torch.Tensor):
            return value
        return torch.tensor(value, dtype=like.dtype, device=like.device)

    def visit(expr: Expr) -> "Tensor":
        match expr:
            case Const(value):
                return tensor(value)
            case Var(name):
                if name not in values:
                    raise ExprError(f"{name} has no value", hint=f"known are {', '.join(values) or 'none'}")
                return tensor(values[name])
            case Neg(a):
                return torch.neg(visit(a))
            case Binary("**", a, b):
                return torch.pow(visit(a), number(b))
            case Call("leaky_relu", (a, slope)):
                return F.leaky_relu(visit(a), number(slope))
            case Binary(name, a, b) | Compare(name, a, b):
                return functions[name](visit(a), visit(b))
            case Call(name, args):
                return functions[name](*map(visit, args))
        raise TypeError(f"not an expression: {expr!r}")

    return visit(expr)
