"""Planned backwards against float64 autograd on inputs of every magnitude."""

import pytest

from specc.compiler.expr import Expr, grid, parse, plan_backward
from specc.compiler.expr.grid import deviations

MISH = "x * ((1 + exp(x)) ** 2 - 1) / ((1 + exp(x)) ** 2 + 1)"


@pytest.mark.parametrize(
    "text",
    [
        MISH, "x / (1 + abs(x))", "x / sqrt(1 + x ** 2)", "1 / (1 + exp(x) ** 2)", "(1 + exp(x) ** 2) ** -1",
        "exp(x) ** 2 / (1 + exp(x) ** 2)", "exp(x) / max(1, exp(x))", "exp(x) / (1 + exp(x) + exp(2 * x))",
        "(exp(x) - exp(-x)) / (exp(x) + exp(-x))", "x ** 3 / (1 + x ** 2)", "x / (1 + x ** 8)",
        "relu(x) * x ** 0.25", "leaky_relu(x, 0.5) ** 2", "gelu(x)", "gelu_tanh(x)", "silu(x)", "30 * tanh(x / 30)",
        "x * tanh(log(1 + exp(x)))", "min(max(x, 0), 6)", "abs(x) ** 1.5",
    ],
)  # fmt: skip
def test_no_magnitude_deviates(text: str) -> None:
    assert list(deviations(parse(text), ("x",))) == []


@pytest.mark.parametrize("text", ["silu(gate) * x", "x * gate / (1 + exp(x))", "x / (1 + abs(gate))", "max(x, gate)"])
def test_no_pair_of_magnitudes_deviates(text: str) -> None:
    assert list(deviations(parse(text), ("x", "gate"))) == []


@pytest.mark.parametrize(
    ("text", "slope", "value", "problem"),
    [
        (
            MISH,
            "((1 + exp(x)) ** 2 - 1 + 2 * x * exp(x) * (1 + exp(x))) / ((1 + exp(x)) ** 2 + 1)"
            " - 2 * x * exp(x) * ((1 + exp(x)) ** 2 - 1) * (1 + exp(x)) / ((1 + exp(x)) ** 2 + 1) ** 2",
            MISH,
            "the gradient by x is nan at x = 23.7137; float64 gives 1",
        ),
        (
            "relu(x) * x ** 0.25",
            "relu(x) ** 0.25 + 0.25 * relu(x) / x ** 0.75",
            "0.8 * slope * x",
            "the value is nan at x = 0; float64 gives 0",
        ),
        ("tanh(x)", "tanh(x) ** 2", "tanh(x)", "the gradient by x is 0 at x = 0; float64 gives 1"),
    ],
)
def test_an_overflow_and_a_wrong_slope_are_found(
    text: str, slope: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(expr: Expr, wrt: tuple[str, ...], keep: object) -> object:
        return plan_backward(expr, wrt)._replace(saves=(("slope", parse(slope)),), value=parse(value))

    monkeypatch.setattr(grid, "plan_backward", planned)
    assert str(next(deviations(parse(text), ("x",)))) == problem
