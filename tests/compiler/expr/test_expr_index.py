"""Formulas and conditions of whole numbers equal Python's, and everything else is refused."""

import itertools

import pytest

from specc.compiler.expr import ExprError
from specc.compiler.expr.index import condition_holds, formula_value, names_in

FORMULAS = ("9 - layer", "2 * (layers // 2) - 1 - layer", "-layer % 3", "layer * layer + 1", "(layer - 7) // 2")
CONDITIONS = (
    "layer % 6 == 5",
    "2 <= layer < 4",
    "layer < 2 or layer >= 5 and layer != 6",
    "not layer == 3",
    "layers - layer > 2",
)


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_those_of_python(text: str) -> None:
    for layer, layers in itertools.product(range(9), range(1, 9)):
        assert formula_value(text, {"layer": layer, "layers": layers}) == eval(text, {"layer": layer, "layers": layers})


@pytest.mark.parametrize("text", CONDITIONS)
def test_conditions_are_those_of_python(text: str) -> None:
    for layer, layers in itertools.product(range(9), range(1, 9)):
        values = {"layer": layer, "layers": layers}
        assert condition_holds(text, values) is eval(text, dict(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a formula"),
        ("layer ==", "not a formula"),
        ("layer", "not a condition"),
        ("True", "not a condition"),
        ("layer == 0.5", "not a whole number"),
        ("layer == x", "not a known name"),
        ("1 // (layer - 2) == 0", "divides by 0"),
        ("layer ** 99 > 1", "not a whole number"),
        ("99999 * 99999 * layer > 1", "exceeds 2147483648"),
        ("print(layer) == 0", "not a whole number"),
        ("layer in (1, 2)", "not a condition"),
        ("a" * 600, "characters"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ExprError, match=message):
        condition_holds(text, {"layer": 2, "layers": 4})


def test_names() -> None:
    assert names_in("layer % 2 == run") == {"layer", "run"}
