"""The values that plan_backward saves, the text of its plans, and their value and gradient."""

import pytest
import torch
from expr_samples import expressions, values

from specc.compiler.expr import KEEPS, Backward, ExprError, Keep, Var, parse, plan_backward, torch_value, variables


def planned(
    text: str, wrt: tuple[str, ...] = ("x",), keep: Keep = "derivative"
) -> tuple[str, list[str], str, list[str], tuple[str, ...]]:
    plan = plan_backward(parse(text), wrt, keep)
    assert [name for name, _ in plan.grads] == list(wrt)
    saves = [f"{name} = {expr}" for name, expr in plan.saves]
    return plan.strategy, saves, str(plan.value), [str(grad) for _, grad in plan.grads], plan.needs


def test_the_saved_derivative_is_the_forwards_only_select() -> None:
    assert planned("leaky_relu(x, 0.5) ** 2") == (
        "derivative", ["slope = where(x > 0, 2 * x, 0.5 * x)"], "0.5 * slope * x", ["d * slope"], (),
    )  # fmt: skip


def test_the_gate_of_an_mlp() -> None:
    assert planned("silu(gate) * x", ("x", "gate")) == (
        "derivative",
        ["slope_x = silu(gate)", "slope_gate = x * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))"],
        "x * slope_x",
        ["d * slope_x", "d * slope_gate"],
        (),
    )


@pytest.mark.parametrize(
    ("text", "grad"),
    [
        ("relu(x)", "where(y > 0, d, 0)"),
        ("relu(x) ** 2", "2 * d * sqrt(y)"),
        ("where(x > 0, x * x, 0)", "2 * d * sqrt(y)"),
        ("2 * relu(x) ** 2", "2.8284271247461903 * d * sqrt(y)"),
        ("relu(x) ** 3", "3 * d * y ** 0.6666666666666666"),
        ("-relu(x)", "where(y < 0, -d, 0)"),
        ("relu(x + bias) * 3", "where(y > 0, 3 * d, 0)"),
        ("leaky_relu(x, 0.1)", "d * where(y > 0, 1, 0.1)"),
        ("where(x > 0, 2 * x, 0.5 * x)", "d * where(y > 0, 2, 0.5)"),
        ("exp(x)", "d * y"),
        ("3 * exp(-2 * x)", "-2 * d * y"),
        ("exp(x) ** 2", "2 * d * y"),
        ("sqrt(x)", "0.5 * d / y"),
    ],
)
def test_functions_of_their_output_save_nothing(text: str, grad: str) -> None:
    strategy, saves, _, grads, needs = planned(text)
    assert (strategy, saves, grads, needs) == ("output", [], [grad], ())


@pytest.mark.parametrize(
    "text",
    [
        "tanh(x)", "sigmoid(x)", "5 * tanh(x / 5)", "relu(x) + 1", "relu(x) * scale", "x ** 2", "log(x)",
        "leaky_relu(x, -0.1)", "leaky_relu(x, 0.1) ** 2", "abs(x)", "max(x, 0)", "exp(x) + relu(x)",
        "exp(x ** 2)", "gelu(x)", "max(x, bias) ** 2",
    ],
)  # fmt: skip
def test_what_a_rounded_output_cannot_give_is_saved(text: str) -> None:
    plan = plan_backward(parse(text), ("x",))
    assert plan.strategy == "derivative"
    assert [name for name, _ in plan.saves] == ["slope"]
    assert plan.grads == (("x", Var("d") * Var("slope")),) and plan.needs == ()


@pytest.mark.parametrize(
    ("text", "grad", "needs"),
    [
        ("x", "d", ()),
        ("3 * x - residual", "3 * d", ()),
        ("x * scale + bias", "d * scale", ("scale",)),
        ("silu(gate) * x", "d * silu(gate)", ("gate",)),
        ("where(mask > 0, x, 0)", "where(mask > 0, d, 0)", ("mask",)),
        ("bias", "0", ()),
    ],
)
def test_linear_in_what_wants_a_gradient(text: str, grad: str, needs: tuple[str, ...]) -> None:
    strategy, saves, value, grads, read = planned(text)
    assert (strategy, saves, grads, read) == ("linear", [], [grad], needs)
    assert value == text


def test_saves_are_shared_and_only_what_is_needed() -> None:
    assert planned("(x + gate) ** 2", ("x", "gate"))[1:4:2] == (
        ["slope_x = 2 * (x + gate)"], ["d * slope_x", "d * slope_x"],
    )  # fmt: skip
    assert planned("gelu(x) + 2 * gate", ("x", "gate"))[3] == ["d * slope_x", "2 * d"]
    assert planned("x * gate", ("x", "gate")) == (
        "inputs", ["slope_x = gate", "slope_gate = x"], "x * gate", ["d * slope_x", "d * slope_gate"], (),
    )  # fmt: skip
    assert planned("relu(x) ** 2 * scale")[2] == "0.5 * slope * x"
    assert planned("exp(x + gate)", ("x", "gate"))[3] == ["d * y", "d * y"]


def test_inputs_may_be_kept_instead_of_derivatives() -> None:
    gelu = "0.5 + 0.5 * erf(0.7071067811865476 * x) + 0.3989422804014327 * x * exp(-0.5 * x ** 2)"
    assert planned("gelu(x)", keep="input") == ("recomputed", [], "gelu(x)", [f"d * ({gelu})"], ("x",))
    assert planned("silu(gate) * x", ("x", "gate"), "input") == (
        "recomputed",
        [],
        "silu(gate) * x",
        ["d * silu(gate)", "d * x * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))"],
        ("gate", "x"),
    )
    assert planned("gelu(x) + 2 * gate", ("x", "gate"), "input")[3:] == ([f"d * ({gelu})", "2 * d"], ("x",))


@pytest.mark.parametrize("text", ["relu(x) ** 2", "x * scale + bias", "x * gate", "exp(x + gate)"])
def test_where_no_derivative_is_saved_nothing_else_is_kept(text: str) -> None:
    wrt = tuple(name for name in ("x", "gate") if name in variables(parse(text)))
    assert plan_backward(parse(text), wrt, "input") == plan_backward(parse(text), wrt)


def test_a_slope_that_is_steeper_than_the_function_does_not_give_its_value() -> None:
    assert planned("abs(x) ** 0.5 * scale")[2] == "scale * sqrt(abs(x))"  # at 0 slope * x would be infinite * 0
    assert planned("scale / x")[2] == "scale / x"


def test_unsimplified_constants() -> None:
    assert planned("silu(gate) * x / 3 ** 2 + sqrt(4)", ("x", "gate"))[2] == "x * silu(gate) / 9 + 2"


def test_reserved_names() -> None:
    for text in ("x * d", "y + x", "gelu(x) * slope"):
        with pytest.raises(ExprError, match="reserved name of the backward pass"):
            plan_backward(parse(text), ("x",))
    with pytest.raises(ExprError, match="repeats"):
        plan_backward(parse("x"), ("x", "x"))


def check(plan: Backward, text: str, wrt: tuple[str, ...], at: dict[str, torch.Tensor], rtol: float) -> int:
    """Runs the plan as kernels would: saves and value from the inputs, gradients from y, saves and needs."""
    expr = parse(text)
    inputs = {name: at[name].detach().requires_grad_(name in wrt) for name in at}
    want = torch_value(expr, inputs).expand(len(at["x"]))
    d = torch.linspace(-1, 2, len(want), dtype=torch.float64)
    grads: list[torch.Tensor | None] = [None] * len(wrt)
    if want.requires_grad:
        grads = [*torch.autograd.grad((want * d).sum(), [inputs[n] for n in wrt], allow_unused=True)]
    want = want.detach()
    saved = {name: torch_value(save, at) for name, save in plan.saves}
    y = torch_value(plan.value, {**at, **saved}).expand(len(want))
    good = want.isfinite() & (want.abs() < 1e6)
    torch.testing.assert_close(y[good], want[good], rtol=rtol, atol=rtol, msg=f"{text}: {plan.value}")
    given = {"d": d, "y": y, **saved, **{name: at[name] for name in plan.needs}}
    compared = 0
    for (name, grad), wanted in zip(plan.grads, grads, strict=True):
        wanted = torch.zeros_like(d) if wanted is None else wanted
        got = torch_value(grad, given).expand(len(d))
        fine = good & wanted.isfinite() & (wanted.abs() < 1e6)
        compared += int(fine.sum())
        torch.testing.assert_close(got[fine], wanted[fine], rtol=rtol, atol=rtol, msg=f"{text} by {name}: {grad}")
    return compared


KNOWN = [
    "leaky_relu(x, 0.5) ** 2", "leaky_relu(x, 0.1) ** 3 * scale", "relu(x) ** 2", "-3 * relu(x) ** 2",
    "relu(x) ** 4 / 7",
    "silu(gate) * x", "gelu(gate) * x", "gelu_tanh(gate) * x", "relu(gate) ** 2 * x", "30 * tanh(x / 30)",
    "exp(-x) * 2",
    "sigmoid(x) * scale", "relu(x + scale)", "leaky_relu(x * scale, 0.2)", "x * gate * scale",
    "(x + gate) ** 2",
    "max(x, gate)", "min(max(x, -1), 1)", "abs(x) ** 3", "log(1 + exp(x))", "x / (1 + abs(x))",
    "silu(x) + scale",
    "where(x > gate, x, 0.5 * gate)", "sqrt(x)", "sqrt(relu(x))", "x * sigmoid(1.702 * x)",
    "erf(x) * exp(gate)",
    "relu(x) * relu(gate)", "1 / (1 + x ** 2)", "where(scale > 0, relu(x), 0.1 * x)", "leaky_relu(x, 2)",
    "x ** 2 + x",
]  # fmt: skip


@pytest.mark.parametrize("text", KNOWN)
@pytest.mark.parametrize("order", [("x", "gate"), ("gate", "x")])
def test_plans_compute_the_gradient(text: str, order: tuple[str, ...]) -> None:
    at = values(5)
    wrt = tuple(name for name in order if name in variables(parse(text)))
    assert check(plan_backward(parse(text), wrt), text, wrt, at, 1e-9) >= len(at["x"]) * len(wrt) // 3
    assert check(plan_backward(parse(text), ("x",)), text, ("x",), at, 1e-9) >= len(at["x"]) // 3
    from_input = plan_backward(parse(text), wrt, "input")
    assert check(from_input, text, wrt, at, 1e-9) >= len(at["x"]) * len(wrt) // 3
    assert not from_input.saves or from_input.strategy == "inputs"


@pytest.mark.parametrize(
    "text",
    [
        "(relu(x) * tanh(x)) ** 1.5", "(max(x, 0) * (x + 2)) ** 1.5", "(relu(x) * gate) ** 2.5",
        "sqrt(relu(x) * tanh(x))", "(relu(x) * gelu(x)) ** 0.5", "(x ** 2 * gate) ** 1.5", "(-relu(x)) ** 1.5",
        "(relu(x) * sigmoid(x) * tanh(gate)) ** 1.5", "(x * gate / abs(gate)) ** 1.5", "sqrt(relu(x) ** 3 * gate)",
        "sqrt(relu(gate) ** 3 * log(2 + exp(x)))", "(relu(x) ** 2 * tanh(gate)) ** 0.75",
    ],
)  # fmt: skip
def test_a_power_of_a_product_is_0_where_a_factor_is_0_and_another_negative(text: str) -> None:
    grid = torch.linspace(-3, 3, 13, dtype=torch.float64)
    at = dict(zip(("x", "gate"), torch.cartesian_prod(grid, grid).T, strict=True))
    wrt = variables(parse(text))
    for keep in KEEPS:
        assert check(plan_backward(parse(text), wrt, keep), text, wrt, at, 1e-9) >= len(grid) ** 2 * len(wrt) // 3


@pytest.mark.parametrize("wrt", [("x",), ("x", "gate"), ("gate", "x", "scale")])
def test_plans_of_random_expressions(wrt: tuple[str, ...]) -> None:
    at = values(6)
    compared = 0
    for expr in expressions(120, 40, depth=3):
        try:
            plan = plan_backward(expr, wrt)
        except ExprError:  # divides by a part that is zero everywhere
            continue
        compared += check(plan, str(expr), wrt, at, 1e-6)
    assert compared > 1200 * len(wrt)


@pytest.mark.parametrize(
    "text", ["relu(x)", "relu(x) ** 2", "relu(x) ** 3", "2 * exp(x)", "leaky_relu(x, 0.1)", "sqrt(x)"]
)
def test_gradients_from_a_bf16_output_keep_its_accuracy(text: str) -> None:
    x = torch.linspace(-4, 9, 4001, dtype=torch.float64).requires_grad_()
    plan = plan_backward(parse(text), ("x",))
    y = torch_value(parse(text), {"x": x})
    (want,) = torch.autograd.grad(y.sum(), x)
    rounded = y.detach().bfloat16().double()
    got = torch_value(plan.grads[0][1], {"d": torch.ones_like(rounded), "y": rounded})
    good = want.isfinite()
    torch.testing.assert_close(got[good], want[good], rtol=2 * 2.0**-8, atol=0)
