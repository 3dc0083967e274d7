"""A fake-quantized LSTM for training: float ops that round wherever the int8 LSTM rounds."""

from collections.abc import Container, Sequence
from dataclasses import replace

from specc.compiler.int8.editor import Editor, Factor
from specc.compiler.int8.lstm_loop import Step
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import wide
from specc.compiler.ops.recurrent import LstmCell
from specc.compiler.ops.rounded import LstmGates, RoundRows
from specc.compiler.ops.sequence import Reversed
from specc.compiler.ops.shape import Last

BIASED = Pointwise(("x + bias",), ("x", "bias"))
SUM = Pointwise(("h + x",), ("h", "x"))


def fake_quantized_gates(
    edit: Editor, node: Node, name: str, x: str, factors: Sequence[Factor], backward: bool
) -> tuple[str, Step]:
    """Adds the nodes that compute the contribution of x to the gates of one LSTM direction, for all steps: a matrix
    product, and the sums with the biases.

    Args:
        edit: The editor of the graph.
        node: The original LSTM node. New nodes are inserted at its position.
        name: The prefix of the names of new nodes.
        x: The reference of the input.
        factors: The matrix products of the direction, with x and with h.
        backward: Whether the direction runs backward in time.

    Returns:
        The reference of the contribution, in the order of the steps, and the step. The step rounds h.
    """
    into, hidden = factors
    gates = edit.add_op(f"{name}_x", Linear(), (*edit.codes(x, into.weight, node), into.weight), node)
    for i, bias in enumerate(factor.bias for factor in factors if factor.bias):
        gates = edit.add_op(f"{name}_biased{i or ''}", BIASED, (gates, bias), node)
    if backward:
        gates = edit.add_op(f"{name}_reversed", Reversed(), (gates,), node)
    bits = edit.input_bits(hidden.weight)

    def update(b: Builder, h: str, c: str, x: str, constants: Sequence[str]) -> str:
        weight, inverse = constants
        rounded = b.add("recurrent.h", RoundRows(bits), (h, inverse))
        products = b.add("recurrent.gates", Linear(), (rounded, weight))
        sums = b.add("recurrent.sums", SUM, (products, b.add("recurrent.x", Last(), (x,))))
        return b.add("recurrent.update", LstmGates(), (sums, c))

    constants = {"weight": hidden.weight, "inverse": edit.inverse(hidden.weight)}
    return gates, Step(f"{wide(bits)}_rounded", constants, update)


def cells_apart(graph: Graph, wanted: Container[str]) -> Graph:
    """Returns the graph with some `LstmCell` nodes split into matrix products, sums, and the op of the gates. A node is
    split if `wanted` contains the name of its input weight, the matrix that multiplies x."""
    nodes = []
    for node in graph.nodes:
        nodes += _cell(graph, node) if isinstance(node.op, LstmCell) and node.inputs[3] in wanted else [node]
    return replace(graph, nodes=tuple(nodes))


def _cell(graph: Graph, node: Node) -> list[Node]:
    x, h, c, into, hidden, *biases = node.inputs
    scope, types, nodes = node.name.rpartition(".")[0], dict(graph.types), list[Node]()

    def add(name: str, op: Op, *inputs: str) -> str:
        nodes.append(Node(name, op, inputs, op.infer([types[ref] for ref in inputs])))
        types.update(zip(nodes[-1].outputs, nodes[-1].types, strict=True))
        return name

    gates = add(f"{scope}.gates_x", Linear(), x, into)
    for i, bias in enumerate(biases):
        gates = add(f"{scope}.gates_biased{i or ''}", BIASED, gates, bias)
    sums = add(f"{scope}.sums", SUM, add(f"{scope}.gates_h", Linear(), h, hidden), add(f"{scope}.row", Last(), gates))
    add(node.name, LstmGates(), sums, c)
    return nodes
