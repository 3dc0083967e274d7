"""The base class of int8 forms, which compute an op with int8 weights, and the interface of the pass that applies
them."""

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
    """A product inside a node.

    The weight is multiplied with node inputs and, in a recurrence, with the node's own outputs. Of each such value, it
    is multiplied with the `part`-th of `parts` equal slices of the features.

    Attributes:
        weight: Ref of the weight [N, K].
        bias: Ref of the bias [N], or "" if there is none.
        read: Indices of the node inputs that are multiplied with the weight.
        made: Indices of the node outputs that are multiplied with the weight.
        part: Index of the slice.
        parts: Number of slices.
    """

    weight: str
    bias: str
    read: tuple[int, ...]
    made: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1


class Editing(Protocol):
    """A graph whose products are being replaced. Names and refs are those of the original graph, unless a new node
    is meant."""

    @property
    def graph(self) -> Graph: ...

    def type(self, ref: str) -> TensorType:
        """Returns the type of a value, original or new."""

    def integer(self, ref: str) -> bool:
        """Whether a value is a parameter that is stored as integers for int8 products."""

    def constant(self, weight: str, suffix: str, type: TensorType) -> str:
        """Declares a tensor that is stored next to a weight, e.g. with suffix `codes`, `offset` or `scale`. Returns its
        ref."""

    def codes(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        """Returns the value `ref` as int8 codes for the product with `weight`.

        An input of 16 bits has two codes per value, so two refs are returned. The codes are computed before the node
        `before`, and all products of one value share them.
        """

    def input_bits(self, weight: str) -> Literal[8, 16]:
        """Returns the bits of the input of the product with `weight`."""

    def inverse(self, weight: str) -> str:
        """Returns the ref of the constant, f32 [K], that the input of the product with `weight` is multiplied with
        before it is rounded to codes."""

    def add(self, node: Node, at: Node) -> str:
        """Inserts a new node at the position of the original node `at`. Returns the ref of its first output."""

    def add_op(self, name: str, op: Op, inputs: Sequence[str], at: Node) -> str:
        """Inserts a new node without an epilogue, with the output types that its op infers.

        Args:
            name: The name of the node.
            op: Its op.
            inputs: Refs of its inputs.
            at: The original node at whose position it is inserted.

        Returns:
            The ref of its first output.
        """

    def function(self, graph: Graph) -> str:
        """Adds a function, unless an equal function exists. Returns its name."""

    def taken(self, old: Node) -> bool:
        """Whether an original node was removed."""

    def replace(self, old: Node, *refs: str) -> None:
        """Removes an original node and redirects the readers of its outputs to `refs`. Pass no `refs` if another node
        has absorbed it."""


@dataclass(frozen=True, slots=True)
class Int8Form:
    """The int8 form of the nodes of one op. The catalogue discovers one module-level instance of each subclass."""

    name: str
    takes: ClassVar[type[Op]]

    def factors(self, graph: Graph, node: Node) -> tuple[Factor, ...]:
        """Returns the products of a node. Empty if the node cannot be computed in int8."""
        raise TypeError(f"{type(self).__name__} does not say what it multiplies")

    def rewrite(self, edit: Editing, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces a node whose weights are all int8."""
        raise TypeError(f"{type(self).__name__} does not say what a node becomes")

    def fake_quantize(self, edit: Editing, node: Node, factors: Sequence[Factor]) -> None:
        """Replaces such a node in a training program by float ops that round wherever `rewrite` rounds. `edit.codes`
        then returns a single value: the float value that the codes represent."""
        raise TypeError(f"{type(self).__name__} does not say how a node is trained for int8")


def sums_of(edit: Editing, weight: str, bias: str) -> tuple[str, str, str]:
    """Returns the stored codes [N, K] i8, offset [N] i32 and scale [N] f32 of a weight. N and K are padded to the
    multiples that an int8 product requires."""
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
    """Returns the beginning of an epilogue: the value of the sums `p` over all codes of an input.

    Second codes are multiplied by a product of their own, f32 [..., N], which is added to the graph.

    Args:
        edit: The graph.
        name: The name of the product, used as prefix for the name of the second.
        codes: Refs of the codes of the input. The product itself reads the first.
        weight: Ref of the weight.
        held: Refs of codes, offset and scale of the weight.
        at: The original node whose position new nodes take.

    Returns:
        The expression, and the operands it reads in addition to p and `scale`, as ref -> variable.
    """
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
    """Returns the part of a kernel's name after `int8_linear`: `i16` if second codes are added, the functions applied
    after scaling, and the output dtype."""
    words = name_of(substitute(expr, {"scale": reread("1"), "second": reread("0")}))
    wide = "i16" if "second" in variables(expr) else ""
    return "_".join(filter(None, (wide, words, type.dtype)))
