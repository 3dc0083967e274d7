"""The witness of torch.fx on expressions: it finds what was printed, and sees any number that is another."""

from types import ModuleType

import pytest
import torch
from expr_samples import expressions
from torch.nn import functional as F

from specc.compiler.expr import PRIMITIVES, Var, parse, variables
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.programs import fx_witness as witness

TYPE = TensorType(("B", 4), "f32")
# Every function with a constant where it takes one, on either side, and what Python computes before Torch is asked.
CONSTANTS = (
    "max(x, 0)", "max(0, x)", "min(x, 6)", "min(1.5, x)", "min(max(x, 0), 6)", "max(x * x, 0.5)", "max(min(6, -x), 0)",
    "where(x > 0, 1, 0.5)", "where(0 < x, x, 0)", "where(2 >= x, x, gate)", "where(1 < 2, x, -x)",
    "where(x == 1, 0, x)", "min(x, -1)",
    "leaky_relu(x, 0.5)", "leaky_relu(x, 0.25 * 2) ** 2", "x ** -2", "x ** 0.5", "2 ** 3 * x", "(1 + 2) * x",
    "x * (1 / 3)", "-(2 * x)", "-(x / 3)", "-x", "1 - x", "2 / x", "x / 2", "max(2, 3) * x", "exp(2) + x",
    "relu(2) * x", "tanh(0.5) * gate", "30 * tanh(x / 30)", "abs(-2) * x", "sqrt(2) * erf(x / sqrt(2))",
    "where(x > gate, 1, -1) * max(gate, -1)", "gelu(1) * x", "silu(x) * sigmoid(1)", "log(2) * x", "gelu_tanh(2) + x",
    "exp2(x) - exp2(0.5)", "sin(x) * cos(gate)",
)  # fmt: skip


def graph_of(text: str) -> Graph:
    names = variables(parse(text))
    b = Builder("g")
    refs = [b.input(name, TYPE) for name in names]
    return b.build({"y": b.add("n", Pointwise((text,), names), refs)})


def traced(text: str) -> torch.fx.Graph:
    """The trace of a module that computes an expression as generated code would."""
    names = variables(parse(text))
    code = Pointwise((text,), names).torch(names, [TYPE] * len(names))
    module = ModuleType("sample")
    vars(module).update(torch=torch, F=F)
    exec(f"class M(torch.nn.Module):\n    def forward(self, {', '.join(names)}):\n        return {code}", vars(module))
    return witness.trace(module.M(), module, "forward")


@pytest.mark.parametrize("text", CONSTANTS)
def test_numbers_are_found(text: str) -> None:
    assert witness.compare(graph_of(text), {}, traced(text)).keys() == {"n"}


def test_every_function_is_among_them() -> None:
    assert all(any(f"{name}(" in text for text in CONSTANTS) for name in PRIMITIVES)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("max(x, 0)", "max(x, 0.5)"),
        ("min(max(x, 0), 6)", "min(max(x, 0), 5)"),
        ("min(max(x, 0), 6)", "max(min(x, 0), 6)"),
        ("where(x > 0, 1, 0.5)", "where(x > 0, 0.75, 0.5)"),
        ("where(0 < x, x, 0)", "where(0 > x, x, 0)"),
        ("where(0 < x, x, 0)", "where(0 <= x, x, 0)"),
        ("exp(2) + x", "exp(3) + x"),
        ("-(2 * x)", "-(3 * x)"),
        ("max(x, gate)", "max(x, 1) * gate"),
    ],
)
def test_another_number_is_seen(text: str, other: str) -> None:
    with pytest.raises(witness.Mismatch, match=r"^n "):
        witness.compare(graph_of(text), {}, traced(other))


def test_random_expressions_are_found() -> None:
    result = 0
    for expr in expressions(300, 7):
        if variables(expr) and not isinstance(expr, Var):
            text = str(expr)
            assert witness.compare(graph_of(text), {}, traced(text)).keys() == {"n"}, text
            result += 1
    assert result > 200
