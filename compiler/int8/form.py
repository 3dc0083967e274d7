"""The int8 form of an op whose weights are int8: the base of each form, and the services of the pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from specc.compiler.expr import Expr, name_of, reread, substitute, variables
from specc.compiler.ir.graph import Graph, Node, Op, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import FINE, Int8Linear, padded

SCALED = Pointwise(("p * scale",), ("p", "scale"), title="f32")


@dataclass(frozen=True, slots=True)
class Factor:
    """A product inside a node. `weight` [N, K] and `bias` [N], empty where there is none, are values of the graph; the
    values multiplied with the weight are the node's inputs `read` and its own outputs `made`, by position, of each the
    `part`-th of `parts` equal parts of its features."""

    weight: str
    bias: str
    read: tuple[int, ...]
    made: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1


class Editing(Protocol):
    """A graph while its products are replaced. Names are those of the graph before."""

    @property
    def graph(self) -> Graph: ...

    def type(self, ref: str) -> TensorType:
        """The type of a value, old or new."""

    def integer(self, ref: str) -> bool:
        """Whether a value is a parameter that is stored for products in whole numbers."""

    def constant(self, weight: str, suffix: str, type: TensorType) -> str:
        """Declares a tensor that is kept beside a weight: `codes`, `offset` or `scale`."""

    def codes(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        """The value `ref` as codes for the product with `weight`, of an input of 16 bits as the two that stand for it,
        made ahead of a node; all products of one value share them."""

    def input_bits(self, weight: str) -> Literal[8, 16]:
        """Bits of the input of the product with `weight`."""

    def inverse(self, weight: str) -> str:
        """The constant by which the input of the product with `weight` is made codes, f32 [K]."""

    def add(self, node: Node, at: Node) -> str:
        """Puts a new node where the old one `at` stands; returns its first output."""

    def add_op(self, name: str, op: Op, inputs: Sequence[str], at: Node) -> str:
        """As `add`, of a node without an epilogue, typed by its op."""

    def function(self, graph: Graph) -> str:
        """Adds a function, unless an equal one is there; returns its name."""

    def taken(self, old: Node) -> bool:
        """Whether an old node was taken out."""

    def replace(self, old: Node, *refs: str) -> None:
        """Takes an old node out and lets the readers of its outputs read `refs`; none where another took it in."""


@dataclass(frozen=True, slots=True)
class Int8Form:
    """How nodes of one op are computed in int8. Subclasses answer; one module-level value of each is what the catalogue
    finds."""

    name: str
    takes: ClassVar[type[Op]]

    def factors(self, graph: Graph, node: Node) -> tuple[Factor, ...]:
        """The products of a node; empty where it cannot be computed so."""
        raise TypeError(f"{type(self).__name__} does not say what it multiplies")

    def rewrite(self, edit: Editing, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces a node whose weights are all int8."""
        raise TypeError(f"{type(self).__name__} does not say what a node becomes")

    def fake_quantize(self, edit: Editing, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces such a node in a program that trains, by floats that round where `rewrite` rounds: `edit.codes`
        gives there the one value that its codes stand for."""
        raise TypeError(f"{type(self).__name__} does not say how a node is trained for int8")


def sums_of(edit: Editing, weight: str, bias: str) -> tuple[str, str, str]:
    """The stored codes [N, K], offset [N] and scale [N] of a weight, N and K as the product takes them."""
    n, k = edit.type(weight).shape
    assert isinstance(n, int) and isinstance(k, int)
    rows = padded(n)
    return (
        edit.constant(weight, "codes", TensorType((rows, padded(k)), "i8")),
        edit.constant(weight, "offset", TensorType((rows,), "i32")),
        edit.constant(weight, "scale", TensorType((rows,), "f32")),
    )


def weighed(
    edit: Editing, name: str, codes: Sequence[str], weight: str, held: Sequence[str], at: Node
) -> tuple[Expr, dict[str, str]]:
    """The value of the sums p of the first of `codes`, all codes counted, as the beginning of an epilogue; and what
    it reads beside p and `scale`. Second codes are multiplied ahead, by a product of their own: f32 [..., N]. `held`
    are the constants of the product."""
    first, *second = codes
    if not second:
        return reread("p * scale"), {}
    codes_ref, offset, scale = held
    zeros = edit.constant(weight, "zeros", edit.type(offset))
    rows = edit.type(first).shape[:-1]
    type = TensorType((*rows, edit.type(offset).width), "f32")
    node = Node(
        f"{name}.second", Int8Linear(), (*second, codes_ref, zeros, scale), (type,), SCALED, (f"{name}.second",)
    )
    return reread(f"p * scale + second / {FINE}"), {edit.add(node, at): "second"}


def title_of(expr: Expr, type: TensorType) -> str:
    """The name of a kernel after `int8_linear`: whether it adds what second codes are worth, the functions behind
    the scale, and what it writes."""
    words = name_of(substitute(expr, {"scale": reread("1"), "second": reread("0")}))
    wide = "i16" if "second" in variables(expr) else ""
    return "_".join(filter(None, (wide, words, type.dtype)))
