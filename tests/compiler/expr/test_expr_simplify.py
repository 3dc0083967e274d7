"""The simplifier keeps values, settles, and finds the forms that reviewers should read."""

import pytest
import torch
from expr_samples import expressions, values

from specc.compiler.expr import Expr, ExprError, parse, simplify, torch_value


def simplified(expr: Expr) -> Expr | None:
    try:
        return simplify(expr)
    except ExprError:  # it divides by a part that is zero everywhere, such as x - x
        return None


@pytest.mark.parametrize("seed", range(4))
def test_idempotent_and_keeps_values(seed: int) -> None:
    at = values(seed)
    compared = 0
    for expr in expressions(250, seed + 10):
        simple = simplified(expr)
        if simple is None:
            continue
        assert simplify(simple) == simple, f"{expr} -> {simple} -> {simplify(simple)}"
        before = torch_value(expr, at).expand(len(at["x"]))
        after = torch_value(simple, at).expand(len(at["x"]))
        good = before.isfinite() & (before.abs() < 1e8)
        compared += int(good.sum())
        torch.testing.assert_close(after[good], before[good], rtol=1e-7, atol=1e-7, msg=f"{expr} -> {simple}")
    assert compared > 3000


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("x * 1 + 0", "x"),
        ("0 * x", "0"),
        ("x - x", "0"),
        ("x / x", "1"),
        ("x + x * 2", "3 * x"),
        ("x * y + y * x", "2 * x * y"),
        ("2 * (3 * x)", "6 * x"),
        ("30 * (x / 30)", "x"),
        ("x / 30", "x / 30"),
        ("x / 4", "0.25 * x"),
        ("2 * x / 3", "2 * x / 3"),
        ("0.1 + 0.2", "0.3"),
        ("x * x ** 2", "x ** 3"),
        ("(2 * x) ** 2", "4 * x ** 2"),
        ("x ** 0", "1"),
        ("sqrt(x) * sqrt(x)", "x"),
        ("sqrt(x ** 2)", "abs(x)"),
        ("sqrt(relu(x) ** 2)", "relu(x)"),
        ("abs(x) ** 2", "x ** 2"),
        ("abs(-3 * x)", "3 * abs(x)"),
        ("x ** -1", "1 / x"),
        ("-(a - b)", "b - a"),
        ("-x + 1", "1 - x"),
        ("-(2 * x * y) / z", "-2 * x * y / z"),
        ("(a - b) * 2 - (b - a)", "3 * a - 3 * b"),
        ("exp(0)", "1"),
        ("log(exp(x))", "x"),
        ("max(x, x)", "x"),
        ("max(x, 0)", "max(x, 0)"),  # not relu: Torch halves the gradient of a tie
        ("relu(2 * x)", "2 * relu(x)"),
        ("relu(-2 * x)", "relu(-2 * x)"),
        ("leaky_relu(x, 0)", "relu(x)"),
        ("leaky_relu(x, 1)", "x"),
        ("where(x > 0, y, y)", "y"),
        ("where(1 > 2, x, y)", "y"),
        ("where(x > 0, x, 0)", "relu(x)"),
        ("where(0 < x, x, x / 2)", "leaky_relu(x, 0.5)"),
        ("where(x > 0, 3 * x ** 2, 0)", "3 * relu(x) ** 2"),
        ("where(x > 0, 2 * x, 0.5 * x)", "where(x > 0, 2 * x, 0.5 * x)"),
        ("where(x < 0, 0.5 * x, x)", "where(x < 0, 0.5 * x, x)"),  # at 0 its derivative is 1
        ("x * where(x > 0, 1, 0.2)", "leaky_relu(x, 0.2)"),
        ("where(x > 0, 1, 0) * relu(x)", "relu(x)"),
        ("d * where(x > 0, 1, 0)", "where(x > 0, d, 0)"),
        ("2 * leaky_relu(x, 0.5) * where(x > 0, 1, 0.5)", "where(x > 0, 2 * x, 0.5 * x)"),
        ("where(x > 0, 1, 0) + where(x > 0, 1, 0.5)", "where(x > 0, 2, 0.5)"),
        ("where(x > 0, where(x < 0, 1, x), 2)", "where(x > 0, x, 2)"),
        ("where(x > 0, where(x != 0, y, 1), 2)", "where(x > 0, y, 2)"),
        ("where(x + 1 > 1, x, 0)", "relu(x)"),
        ("where(-x < 0, x, 0)", "relu(x)"),
        ("1 / (1 + exp(-x))", "sigmoid(x)"),
        ("exp(x) / (exp(x) + 1)", "sigmoid(x)"),
        ("1 / (1 + exp(x) ** 2)", "sigmoid(-2 * x)"),
        ("exp(x) ** 2 / (1 + exp(2 * x))", "sigmoid(2 * x)"),
        ("x / (1 + y) * (1 + z)", "x / (1 + y) * (1 + z)"),  # the product first might overflow
        ("1 / (1 + y) / (1 + y)", "1 / (1 + y) / (1 + y)"),
        ("(1 + y) * x / (1 + y)", "x"),
        ("2 * (x / (1 + y)) + x * (1 / (1 + y))", "3 * x / (1 + y)"),
        ("silu(gate) * x", "x * silu(gate)"),
        ("(1 + y) * tanh(x) * y * 2", "2 * y * tanh(x) * (1 + y)"),
    ],
)
def test_reads_well(text: str, simple: str) -> None:
    assert str(simplify(parse(text))) == simple


def test_refuses_division_by_zero_and_overflow() -> None:
    with pytest.raises(ExprError, match="divides by zero"):
        simplify(parse("x / (y - y)"))
    with pytest.raises(ExprError, match="divides by zero"):
        simplify(parse("(y - y) ** -2"))
    with pytest.raises(ExprError, match="overflows"):
        simplify(parse("1e300 * x * 1e300"))
