"""Evaluates expressions in two ways: in double precision as a Python float, or with Torch operations, for example as a
float64 reference."""

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from .positional import whole_function
from .primitives import PRIMITIVES
from .values import Binary, Call, Compare, Const, Expr, ExprError, Logic, Neg, Read, Var, plain

if TYPE_CHECKING:
    from torch import Tensor

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": math.pow,
    "//": operator.floordiv, "%": operator.mod,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def apply(name: str, *values: float) -> float:
    """Applies a function, operator or comparison to floats.

    Raises ExprError if the result is undefined or not finite.
    """
    try:
        known = PRIMITIVES.get(name) or whole_function(name)
        result = (known.value if known is not None else OPERATORS[name])(*values)
    except (ArithmeticError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        shown = [plain(value) for value in values]
        operands = [f"({text})" if text.startswith("-") else text for text in shown]
        text = f"{name}({', '.join(shown)})" if name in PRIMITIVES else f" {name} ".join(operands)
        raise ExprError(f"{text} is not a finite number")
    return result


def number(expr: Expr, /, **values: float) -> float:
    """Evaluates an expression in double precision: `number(parse("1 / sqrt(layer + 1)"), layer=3) == 0.5`.

    Raises ExprError if a variable has no value, or if the result is undefined or overflows.
    """
    match expr:
        case Const(value):
            return value
        case Var(name):
            if name not in values:
                raise ExprError(f"{name} has no value", hint=f"choose from {', '.join(values) or 'none'}")
            return float(values[name])
        case Neg(a):
            return -number(a, **values)
        case Call("where", (condition, a, b)):
            return number(a if number(condition, **values) else b, **values)
        case Binary(name, a, b) | Compare(name, a, b):
            return apply(name, number(a, **values), number(b, **values))
        case Logic(op, parts):
            truths = [bool(number(part, **values)) for part in parts]
            return not truths[0] if op == "not" else all(truths) if op == "and" else any(truths)
        case Call(name, args):
            return apply(name, *(number(arg, **values) for arg in args))
    raise TypeError(f"not an expression: {expr!r}")


def torch_value(expr: Expr, values: "Mapping[str, Tensor | float]") -> "Tensor":
    """Evaluates an expression with Torch operations. The result is differentiable, with Torch's subgradients.

    Shapes broadcast. Constants have the dtype and device of the first floating-point tensor in `values`, or of the
    first tensor if no tensor is floating-point. Without tensors, constants are float64 on the CPU. Float64 inputs
    therefore give a float64 reference, even with additional integer inputs.
    """
    import torch
    from torch.nn import functional as F

    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    like = [*floats, *tensors, torch.empty((), dtype=torch.float64)][0]

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
                    raise ExprError(f"{name} has no value", hint=f"choose from {', '.join(values) or 'none'}")
                return tensor(values[name])
            case Neg(a):
                return torch.neg(visit(a))
            case Binary("**", a, b):
                return torch.pow(visit(a), number(b))
            case Binary(name, a, b) | Compare(name, a, b):
                return OPERATORS[name](visit(a), visit(b))  # type: ignore[no-any-return]
            case Logic("not", (part,)):
                return ~visit(part)
            case Logic(op, (first, *rest)):
                return reduce(torch.logical_and if op == "and" else torch.logical_or, map(visit, rest), visit(first))
            case Read(table, indices):
                elements = tensor(values[table])  # indices may be out of range where a mask hides the result
                at = (visit(index).long() for index in indices)
                return elements[tuple(i.clamp(0, size - 1) for i, size in zip(at, elements.shape, strict=True))]
            case Call(name, (first, *constants)) if whole := whole_function(name):
                return whole.torch(visit(first), *map(number, constants))
            case Call(name, (first, *rest)):
                primitive = PRIMITIVES[name]
                module, _, attribute = primitive.torch.partition(".")
                function = getattr(F if module == "F" else torch, attribute)
                others = map(number if primitive.derivative else visit, rest)
                return function(visit(first), *others, **primitive.torch_keywords)  # type: ignore[no-any-return]
        raise TypeError(f"not an expression: {expr!r}")

    return visit(expr)
