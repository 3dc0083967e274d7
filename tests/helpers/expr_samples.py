"""Seeded random expressions of the pointwise language, and values for their variables."""

import random

import torch

from specc.compiler.expr import Binary, Call, Compare, Const, Expr, ExprError, Neg, Var, parse, torch_value
from specc.compiler.expr.values import children

NAMES = ("x", "gate", "scale")
UNARY = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "log", "sqrt", "erf", "abs")
CONSTANTS = (-2.0, -1.0, -0.5, 0.0, 0.1, 0.5, 1.0, 1.702, 2.0, 3.0, 30.0)
EXPONENTS = (-2.0, -1.0, 0.5, 1.5, 2.0, 3.0, 4.0)
POINTS = 32


def expressions(count: int, seed: int, depth: int = 4) -> list[Expr]:
    """`count` expressions that `parse` accepts; every function occurs among a few dozen."""
    rng = random.Random(seed)
    results: list[Expr] = []
    while len(results) < count:
        expr = _expression(rng, rng.randint(1, depth))
        try:
            parse(str(expr))
        except ExprError:  # a constant part that is not finite, or too long
            continue
        results.append(expr)
    return results


def _expression(rng: random.Random, depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.08:
        return Const(rng.choice(CONSTANTS)) if rng.random() < 0.25 else Var(rng.choice(NAMES))

    def part() -> Expr:
        return _expression(rng, depth - 1)

    kind = rng.random()
    if kind < 0.4:
        return Binary(rng.choice("++--**/"), part(), part())
    if kind < 0.5:
        return Binary("**", part(), Const(rng.choice(EXPONENTS)))
    if kind < 0.55:
        inner = part()
        return inner if isinstance(inner, Const) else Neg(inner)
    if kind < 0.62:
        return Call("leaky_relu", (part(), Const(rng.choice((0.01, 0.5, 0.0, 2.0)))))
    if kind < 0.7:
        return Call(rng.choice(("min", "max")), (part(), part()))
    if kind < 0.78:
        other = Const(0.0) if rng.random() < 0.6 else part()
        condition = Compare(rng.choice(("<", "<=", ">", ">=", "==", "!=")), part(), other)
        return Call("where", (condition, part(), part()))
    return Call(rng.choice(UNARY), (part(),))


def values(seed: int, *, grad: bool = False) -> dict[str, torch.Tensor]:
    """POINTS float64 values a variable that are exact in float32: most moderate, some near 0, none a kink."""
    generator = torch.Generator().manual_seed(seed)
    operands = {}
    for name in NAMES:
        size = torch.where(torch.arange(POINTS) % 4 == 0, 0.05, 2.0).double()
        drawn = torch.randn(POINTS, generator=generator, dtype=torch.float64) * size
        operands[name] = drawn.float().double().requires_grad_(grad)
    return operands


def defined(expr: Expr, at: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where every part of `expr` is finite: min, max and where can hide one that is not."""
    parts = [defined(part, at) for part in children(expr)]
    if not isinstance(expr, Compare):
        parts.append(torch_value(expr, at).expand(POINTS).isfinite())
    return torch.stack(parts).all(0)


def check_single(expr: Expr, at: dict[str, torch.Tensor], got: torch.Tensor, text: str) -> int:
    """Holds `got`, computed in float32, to the float64 reference; returns how many points could be compared.

    Left out is where float32 itself overflows or cancels. The bound grows with how far the reference moves
    if a value moves by a few float32 roundings, and with how far Torch's own float32 is off.
    """
    floats = {name: value.float() for name, value in at.items()}
    want = torch_value(expr, at).expand(POINTS)
    moved = [{**at, name: at[name] * (1 + step)} for name in NAMES for step in (3e-7, -3e-7)]
    moved += [{name: at[name] * (1 + step) for name in NAMES} for step in (3e-7, -3e-7)]
    slack = torch.stack([(torch_value(expr, near).expand(POINTS) - want).abs() for near in moved]).amax(0)
    single = (torch_value(expr, floats).expand(POINTS).double() - want).abs()
    good = defined(expr, floats) & slack.isfinite() & (single < 1e-3 * (1 + want.abs()))
    wrong = good & ~((got - want).abs() <= 1e-5 * (1 + want.abs()) + 30 * (slack + single))
    assert not wrong.any(), f"{expr}: {text} is {got[wrong]}, not {want[wrong]}"
    return int(good.sum())


def with_nan(seed: int) -> dict[str, torch.Tensor]:
    """As `values`, of which every second x is NaN, and every third gate."""
    at = values(seed)
    at["x"][::2], at["gate"][::3] = torch.nan, torch.nan
    return at


def check_nan(expr: Expr, at: dict[str, torch.Tensor], got: torch.Tensor, text: str) -> int:
    """Holds `got`, computed in float32, to where Torch gives NaN and where a number; returns how many NaN there are.

    Left out is where float32 overflows, and where its NaN is none in float64.
    """
    want = torch_value(expr, at).expand(POINTS)
    single = torch_value(expr, {name: value.float() for name, value in at.items()}).expand(POINTS)
    good = (want.isnan() == single.isnan()) & ~single.isinf()
    wrong = good & (got.isnan() != want.isnan())
    assert not wrong.any(), f"{expr}: {text} is {got[wrong]}, not {want[wrong]}"
    return int((good & want.isnan()).sum())
