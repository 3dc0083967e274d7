"""Nested rules repeat their operands: what they build is bounded, and with it the time."""

import time

import pytest

from specc.compiler.expr import ExprError, plan_backward
from specc.compiler.expr import parse as parsed
from specc.compiler.expr.values import LARGEST_TREE

SECONDS = 5.0  # each takes milliseconds; six nested ones took 51 s, and every further one ten times as long


def nested(count: int, text: str) -> str:
    """`count` levels of `text`, in which {e} is the level below and {i} a number of its own."""
    inner = "x"
    for i in range(1, count + 1):
        inner = text.format(e=inner, i=i)
    return inner


@pytest.mark.parametrize("count", [3, 6, 12, 24])
@pytest.mark.parametrize(
    "text",
    [
        "abs({e} - {i})", "max({e}, {i} * x + 1)", "max(min({e}, {i} * x), {i} - x)", "max({e}, {i} * x)",
        "min(abs({e}), {i} - x)", "abs({e} - {i} * x)", "where({e} > {i}, {e}, x)", "leaky_relu({e} - {i}, 0.5)",
        "({e}) / (1 + abs({e}))",
    ],
)  # fmt: skip
def test_nesting_takes_no_time(text: str, count: int) -> None:
    start = time.process_time()
    try:
        expr = parsed(nested(count, text))
        plan_backward(expr, ("x",))
    except ExprError as error:
        assert error.hint == "split it" or "split" in error.message
    assert time.process_time() - start < SECONDS


def test_a_tree_has_a_largest_size() -> None:
    expr = parsed("x + 1")
    assert expr.size == 3 and parsed("where(x > 0, x, -x)").size == 7
    with pytest.raises(ExprError, match=f"more than {LARGEST_TREE} parts; split it"):
        for _ in range(13):
            expr = expr * expr
    assert expr.size <= LARGEST_TREE


def test_six_nested_choices_have_a_derivative() -> None:
    for text in ("abs({e} - {i})", "max({e}, {i} * x + 1)"):
        plan = plan_backward(parsed(nested(6, text)), ("x",))
        assert [name for name, _ in plan.saves] == ["slope"]
