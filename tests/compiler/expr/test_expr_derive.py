"""Derivatives against Torch's autograd, at ordinary points and at kinks, and homogeneity."""

import pytest
import torch
from expr_samples import NAMES, expressions, values

from specc.compiler.expr import ExprError, derive, homogeneous_degree, parse, torch_value


@pytest.mark.parametrize("seed", range(4))
def test_matches_autograd(seed: int) -> None:
    at = values(seed, grad=True)
    compared = 0
    for expr in expressions(125, seed + 20):
        value = torch_value(expr, at).expand(len(at["x"]))
        if not value.requires_grad:
            assert {str(derive(expr, name)) for name in NAMES} == {"0"}
            continue
        wanted = torch.autograd.grad(value.sum(), [at[name] for name in NAMES], allow_unused=True)
        for name, want in zip(NAMES, wanted, strict=True):
            try:
                slope = derive(expr, name)
            except ExprError:
                continue
            got = torch_value(slope, at).detach().expand(len(value))
            want = torch.zeros_like(got) if want is None else want
            good = value.isfinite() & want.isfinite() & (want.abs() < 1e8) & (value.abs() < 1e8)
            compared += int(good.sum())
            torch.testing.assert_close(
                got[good],
                want[good],
                rtol=1e-6,
                atol=1e-6,
                msg=f"d {expr} / d {name} = {slope}",
            )
    assert compared > 4000


@pytest.mark.parametrize(
    "text",
    [
        "relu(x)", "leaky_relu(x, 0.3)", "abs(x)", "max(x, 0)", "min(x, 0)", "max(x, y)", "min(y, x)",
        "relu(x) ** 2",
        "where(x > 0, x, 0.3 * x)", "where(x >= 0, x, 0.3 * x)", "where(x < 0, 0.3 * x, x)", "abs(x) ** 3",
        "where(x == 0, 5 * x, x)", "relu(relu(x))", "abs(relu(x))", "relu(2 * x)", "relu(-x)",
        "max(relu(x), 0)",
        "leaky_relu(-2 * x, 0.3)", "x * relu(x)", "relu(x) + relu(-x)", "abs(-3 * x)",
        "max(x, y) * min(x, y)",
        "min(max(x, 0), 6)", "leaky_relu(x, 0.3) ** 2", "leaky_relu(leaky_relu(x, 0.5), 0.5)",
        "relu(max(x, 0))",
    ],
)  # fmt: skip
def test_kinks_have_torchs_subgradients(text: str) -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 6.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.0, 1.0, -1.0, 6.0, -1.0, 2.0], dtype=torch.float64)
    expr = parse(text)
    (want,) = torch.autograd.grad(torch_value(expr, {"x": x, "y": y}).sum(), x)
    got = torch_value(derive(expr, "x"), {"x": x, "y": y}).expand(6)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("leaky_relu(x, 0.5) ** 2", "where(x > 0, 2 * x, 0.5 * x)"),
        ("relu(x) ** 2", "2 * relu(x)"),
        ("x ** 1.6667", "1.6667 * x ** 0.6667"),
        ("relu(x)", "where(x > 0, 1, 0)"),
        ("30 * tanh(x / 30)", "1 - tanh(x / 30) ** 2"),
        ("silu(x)", "sigmoid(x) * (1 + x * (1 - sigmoid(x)))"),
        ("exp(-2 * x)", "-2 * exp(-2 * x)"),
        ("log(1 + exp(x))", "sigmoid(x)"),
        ("sqrt(x)", "0.5 / sqrt(x)"),
        ("y / x", "-y / x ** 2"),
        ("x / (1 + abs(x))", "(1 + x / (1 + abs(x)) * where(x > 0, -1, where(x < 0, 1, 0))) / (1 + abs(x))"),
        ("exp(2 * x) / (1 + x ** 2)", "(2 * exp(2 * x) - 2 * x * (exp(2 * x) / (1 + x ** 2))) / (1 + x ** 2)"),
        ("max(x, 0)", "where(x > 0, 1, where(x < 0, 0, 0.5))"),
        ("x * gate", "gate"),
        ("gate", "0"),
    ],
)
def test_reads_well(text: str, slope: str) -> None:
    assert str(derive(parse(text), "x")) == slope


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "erf"])
def test_saturates_without_overflow(name: str) -> None:
    x = torch.tensor([-1e4, -100.0, 100.0, 1e4], dtype=torch.float32)
    got = torch_value(derive(parse(f"{name}(x)"), "x"), {"x": x})
    ends = [0.0, 0.0, 1.0, 1.0] if name in ("gelu", "gelu_tanh", "silu") else [0.0] * 4
    torch.testing.assert_close(got, torch.tensor(ends), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "degree"),
    [
        ("x", 1), ("3", 0), ("x ** 3", 3), ("-2 * x ** 2 * y", 2), ("relu(x)", 1), ("abs(x)", 1),
        ("sqrt(x)", 0.5),
        ("leaky_relu(x, 0.5) ** 2", 2), ("leaky_relu(x, 0.5) ** 3 / 7", 3), ("max(x, 0.1 * x)", 1),
        ("1 / x", -1),
        ("relu(x) ** 2 + x ** 2 * tanh(y)", 2), ("(x + relu(x)) ** 2", 2), ("x * silu(y)", 1),
        ("x * abs(x)", 2),
        ("x + 1", None), ("tanh(x)", None), ("silu(x)", None), ("x + x ** 2", None), ("relu(x + 1)", None),
        ("where(x > 0, x, x ** 2)", None), ("exp(x)", None), ("where(x > 1, x, 2 * x)", 1),
        ("x * log(x)", None),
    ],
)  # fmt: skip
def test_homogeneous_degree(text: str, degree: float | None) -> None:
    assert homogeneous_degree(parse(text), "x") == degree
