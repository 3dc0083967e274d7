"""Pointwise nodes after a product: which are joined, and into what."""

from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.passes.join_pointwise import join_pointwise


def joined(text: str, *names: str, bias: str = "p + bias", dtype: str = "") -> list[str]:
    """The nodes `p`, a product, `sum` and `y`, joined. `y` computes `text`, and its variables stand for `names`."""
    b = Builder("graph")
    for name, shape in {"x": ("B", "T", 8), "w": (4, 8), "bias": (4,), "other": ("B", "T", 4)}.items():
        b.input(name, TensorType(shape, "bf16"))
    b.add("p", Linear(), ("x", "w"))
    pointwise(b, "sum", bias, dtype=dtype, p="p", bias="bias")
    pointwise(b, "y", text, **dict(zip("abc", names, strict=False)))
    nodes = join_pointwise(b.build({"y": "y"}).nodes, {"p"})
    return [f"{node.name}({', '.join(node.inputs)}){getattr(node.op, 'outputs', '')}" for node in nodes]


def test_a_sum_with_a_bias_is_joined_with_its_reader() -> None:
    assert joined("gelu(a)", "sum") == ["p(x, w)", "y(p, bias)('gelu(a + bias)',)"]
    assert joined("a * b", "other", "sum") == ["p(x, w)", "y(other, p, bias)('a * (b + bias)',)"]
    assert joined("a * b", "sum", "bias", bias="p * exp(bias)") == ["p(x, w)", "y(p, bias)('a * exp(b) * b',)"]


def test_a_reader_of_the_product_keeps_its_variable() -> None:
    assert joined("a * silu(b)", "p", "sum") == ["p(x, w)", "y(p, bias)('a * silu(a + bias)',)"]


def test_what_is_not_joined() -> None:
    apart = ["p", "sum", "y"]
    assert [text.split("(")[0] for text in joined("a", "sum", dtype="f32")] == apart  # y would convert nothing
    assert [text.split("(")[0] for text in joined("a + b", "sum", "sum")] == apart
    assert [text.split("(")[0] for text in joined("a + b", "other", "p")] == apart  # nothing reads the sum
