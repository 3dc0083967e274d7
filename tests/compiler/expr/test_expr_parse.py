"""Text to expression: what is accepted, what is refused, and how the refusal reads."""

import time

import pytest
from expr_samples import expressions

from specc.compiler.expr import Binary, Call, Compare, Const, ExprError, Neg, Var, number, parse, substitute, variables


def test_reads_python_precedence() -> None:
    x, y = Var("x"), Var("y")
    assert parse("-x ** 2") == Neg(Binary("**", x, Const(2)))
    assert parse("x - y - 1") == Binary("-", Binary("-", x, y), Const(1))
    assert parse("x ** -2") == Binary("**", x, Const(-2))
    assert parse("where(x >= 0, x, -1)") == Call("where", (Compare(">=", x, Const(0)), x, Const(-1)))
    assert parse("  x\n + 1") == x + 1


@pytest.mark.parametrize("seed", range(4))
def test_canonical_text_reads_back_exactly(seed: int) -> None:
    for expr in expressions(250, seed):
        text = str(expr)
        assert parse(text) == expr, text
        assert str(parse(text)) == text


def test_values_are_hashable_and_compare_by_structure() -> None:
    assert {parse("x + 1"): 1}[parse("x+1.0")] == 1
    assert parse("x + 1") != parse("1 + x")
    assert Const(-0.0) == Const(0.0) and str(Const(-0.0)) == "0"
    with pytest.raises(ExprError, match="not finite"):
        Const(float("nan"))
    with pytest.raises(ExprError, match="negative"):
        Neg(Const(1.0))


def test_variables_in_reading_order_and_substitution_all_at_once() -> None:
    expr = parse("silu(gate) * x + where(gate > bias, x, 0)")
    assert variables(expr) == ("gate", "x", "bias")
    assert substitute(expr, {"gate": Var("x"), "x": Var("gate")}) == parse("silu(x) * gate + where(x > bias, gate, 0)")
    assert substitute(parse("-x"), {"x": Const(2)}) == Const(-2)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "empty"),
        ("   ", 0, "empty"),
        ("__import__('os')", 0, "unknown function __import__"),
        ("__import__('os').system('true')", 0, "function|call"),
        ("x + lambda: 1", 4, "not an expression|lambda"),
        ("lambda x: x", 0, "lambda"),
        ("x.real", 0, "attribute access"),
        ("(x := 3)", 1, ":="),
        ("x[0]", 0, "indexing"),
        ("10**10**10", 4, "exponent"),
        ("9**9**9", 3, "exponent"),
        ("x ** 1000", 5, "exponent"),
        ("x ** y", 5, "exponent of .* constant"),
        ("9.0**60*9.0**60*9.0**60*9.0**60*9.0**60*9.0**60", 0, "not a finite"),
        ("exp(exp(exp(9)))", 4, "not a finite"),
        ("1e999", 0, "not finite"),
        ("1 / 0", 0, "not a finite"),
        ("log(-1)", 0, "not a finite"),
        ("x / 0", 0, "x / 0 divides by zero"),
        ("y + 2 * (x / (x - x))", 9, r"x / \(x - x\) has no value: x / 0 divides by zero"),
        ("where(x > 0, x, 1 / relu(y - y))", 16, "divides by zero"),
        ("x * (x - x) ** -1", 4, r"0 \*\* -1 divides by zero"),
        ("x + log(0 * x)", 4, r"log\(0\) is not a finite"),
        ("x + 1j", 4, "not a number"),
        ("True", 0, "not a number"),
        ("'x'", 0, "not a number"),
        ("caf\u00e9", 3, "character"),
        ("\uff58", 0, "character"),  # a full-width x, which Python would read as x
        ("x\0", 1, "character"),
        ("x # y", 2, "character"),
        ("x \\\n + y", 2, "character"),
        ("x) + (y", 1, "has no opening parenthesis"),
        ("(x", 0, "not closed"),
        ("x y", 0, "not an expression"),
        ("x; y", 1, "not an expression"),
        ("0,01 * x", 2, "not an expression: a whole number begins with 0"),
        ("x, y", 0, "comma"),
        ("*x", 0, "not an expression|starred"),
        ("[x for x in y]", 0, "listcomp"),
        ("x % 2", 0, "%"),
        ("x @ y", 0, "@"),
        ("not x", 0, "and, or, not"),
        ("x if y else z", 0, "and, or, not"),
        ("x > 0", 0, "only valid as the condition"),
        ("where(x, 1, 2)", 6, "one comparison"),
        ("where(0 < x < 1, x, 2)", 6, "chained"),
        ("where(x in y, x, 2)", 6, "one comparison"),
        ("relu(x, y)", 0, "takes 1 arguments, not 2"),
        ("relu(inplace=x)", 13, "no named arguments"),
        ("relu(*x)", 5, "starred"),
        ("leaky_relu(x, y)", 14, "constant"),
        ("relu", 0, "is a function"),
        ("x(1)", 0, "unknown function x"),
        ("relu(x)(y)", 0, "call"),
        ("f'{x}'", 0, "not part"),
    ],
)
def test_refuses_with_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(ExprError, match=message) as caught:
        parse(text)
    assert caught.value.column == column
    assert caught.value.message in str(caught.value)


@pytest.mark.parametrize("text", ["0 * x", "x - x", "x / (x - 1)", "x ** -1", "x + 1 / relu(x)", "x + sqrt(x - x)"])
def test_parts_without_a_value_at_some_inputs_are_accepted(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10_000 + "x" + ")" * 10_000,
        "(" * 240 + "x" + ")" * 240,
        "-" * 499 + "x",
        "relu(" * 99 + "x",
        "+".join("x" * 250),
        "**".join("2" * 200),
        "9" * 500,
        "9" * 5000,
        "x" + "[" * 240,
        "\ud800",
    ],
)
def test_hostile_text_is_refused_promptly(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ExprError):
        parse(text)
    assert time.process_time() - start < 5  # no bound on speed: a bomb would take hours


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gelo(x)", "did you mean gelu?"),
        ("leaky_rlu(x, 0.1)", "did you mean leaky_relu?"),
        ("swish(x)", "write silu(x)"),
        ("pow(x, 2)", "write x ** n"),
        ("qqqq(x)", "choose from abs, cos"),
        ("leaky_relu(x)", "write leaky_relu(x, 0.01)"),
        ("x and y", "write where(x > 0, a, b)"),
    ],
)
def test_says_what_to_do(text: str, hint: str) -> None:
    with pytest.raises(ExprError) as caught:
        parse(text)
    assert caught.value.hint.startswith(hint)
    assert hint in str(caught.value)


def test_variables_are_checked_if_given() -> None:
    assert parse("silu(gate) * x", variables=("x", "gate")) == parse("silu(gate) * x")
    with pytest.raises(ExprError, match="unknown variable gte") as caught:
        parse("silu(gte) * x", variables=("x", "gate"))
    assert (caught.value.column, caught.value.hint) == (5, "did you mean gate?")
    with pytest.raises(ExprError, match="choose from none"):
        parse("x", variables=())


def test_number() -> None:
    assert number(parse("1/sqrt(layer + 1)"), layer=3) == 0.5
    assert number(parse("where(layer < 2, 1, max(layer, 5)) ** 2"), layer=3) == 25
    assert number(parse("leaky_relu(-2, 0.25) + relu(-1) - min(1, 2)")) == -1.5
    assert number(parse("sigmoid(800) + sigmoid(-800) + silu(-800)")) == 1
    assert number(parse("expr + self"), expr=1, self=2) == 3
    with pytest.raises(ExprError, match="width has no value"):
        number(parse("layer + width"), layer=1)
    for text in ("1 / layer", "log(layer)", "(layer - 2) ** 0.5", "exp(1000 - layer)", "layer ** -1"):
        with pytest.raises(ExprError, match="not a finite number"):
            number(parse(text), layer=0)
