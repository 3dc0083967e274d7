"""Names of epilogues."""

import pytest

from specc.compiler.expr import ExprError, name_of, parse


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x", ""), ("gelu(x)", "gelu"), ("leaky_relu(x, 0.5) ** 2", "leaky_relu2"), ("relu(x) ** 2", "relu2"),
        ("x ** 2", "square"), ("x ** 3", "cube"), ("x ** 4", "pow4"), ("x ** -1.5", "powm1p5"),
        ("x ** (1 / 3)", "pow0p3333"), ("x ** 0.6667000000000001", "pow0p6667"), ("x ** -0.00001", "powm1em05"),
        ("x ** 0.5", "sqrt"),
        ("(x + y) ** 2", "add_square"), ("30 * tanh(x / 30)", "tanh"), ("acc * slope", "mul"), ("-x", ""),
        ("silu(gate) * x", "silu_mul"), ("x * silu(gate)", "mul_silu"), ("x + residual", "add"), ("x - y",
        "sub"),
        ("x / y", "div"), ("1 / x", "div"), ("x + 1", "add"), ("relu(tanh(x)) ** 2", "relu2_tanh"),
        ("gelu(x + bias) * scale", "gelu_add_mul"), ("where(x > 0, exp(x), x)", "where_exp"),
        ("x * (1 / 3)", ""),
        ("max(x, 0) + exp(2)", "max_add"), ("x ** 1", ""), ("relu(x) ** 12", "relu_pow12"), ("x", ""),
    ],
)  # fmt: skip
def test_spells_functions_in_reading_order(text: str, name: str) -> None:
    assert name_of(parse(text)) == name


def test_asks_for_a_name_beyond_48_characters() -> None:
    assert len(name_of(parse("gelu_tanh(gelu_tanh(gelu_tanh(gelu_tanh(tanh(x)))))"))) == 44
    with pytest.raises(ExprError, match="more than 48; give the activation a name:"):
        name_of(parse("gelu_tanh(gelu_tanh(gelu_tanh(gelu_tanh(gelu_tanh(x)))))"))
