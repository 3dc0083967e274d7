"""A fake-quantized LSTM for training: float ops that round wherever the int8 LSTM rounds."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Literal

from specc.compiler.int8.form import Editing, Factor
from specc.compiler.ir.graph import Builder, Graph, Node, Op, TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import wide
from specc.compiler.ops.recurrent import LstmCell
from specc.compiler.ops.region import Scan, returned
from specc.compiler.ops.rounded import LstmGates, RoundRows
from specc.compiler.ops.sequence import AsStep, Reversed
from specc.compiler.ops.shape import Last

BIASED = Pointwise(("x + bias",), ("x", "bias"))
SUM = Pointwise(("h + x",), ("h", "x"))


def fake_quantized(
    edit: Editing, node: Node, name: str, x: str, state: Sequence[str], factors: Sequence[Factor], backward: bool
) -> tuple[str, str, str]:
    """Adds one direction of an LSTM: one product for the gates of all steps of x, with the biases, and a loop over the
    steps of h, which is rounded at each step.

    Args:
        edit: The graph.
        node: The original LSTM node, whose position new nodes take.
        name: Prefix of the names of new nodes.
        x: Ref of the input.
        state: Refs of the initial h and c.
        factors: The products of the direction, with x and with h.
        backward: Whether the direction runs backward in time.

    Returns:
        Refs of y [B, T, H] and of the final h and c.
    """
    into, hidden = factors
    gates = edit.add_op(f"{name}_x", Linear(), (*edit.codes(x, into.weight, node), into.weight), node)
    for i, bias in enumerate(factor.bias for factor in factors if factor.bias):
        gates = edit.add_op(f"{name}_biased{i or ''}", BIASED, (gates, bias), node)
    if backward:
        gates = edit.add_op(f"{name}_reversed", Reversed(), (gates,), node)
    inputs = (*state, gates, hidden.weight, edit.inverse(hidden.weight))
    step = edit.function(_step([edit.type(ref) for ref in inputs], edit.input_bits(hidden.weight)))
    types = [edit.type(ref) for ref in state]
    y = edit.type(x).with_shape(*edit.type(x).shape[:-1], types[0].width)
    loop = edit.add(Node(f"{name}_loop", loop_of(step, name, backward, (*types, y)), inputs, (*types, y)), node)
    out = f"{loop}:2"
    if backward:
        out = edit.add_op(f"{name}_y", Reversed(), (out,), node)
    return out, loop, f"{loop}:1"


def loop_of(step: str, name: str, backward: bool, types: Sequence[TensorType]) -> Scan:
    """Returns the op of one direction's loop over the function `step`.

    The loop's path is inside the scope of `name`, so that paths of different stages cannot clash.

    Args:
        step: The name of the function of one step.
        name: The name of the direction.
        backward: Whether the direction runs backward in time.
        types: The types of h, c and y.

    Returns:
        The op, with outputs h, c and y.
    """
    scope, _, word = name.rpartition(".")
    at = f"{scope}.{'back_' if backward else ''}steps"
    return Scan(step, at, 2, 1, returned(types), tuple(f"{word}_{w}" for w in "hcy"))


def _step(types: Sequence[TensorType], bits: Literal[8, 16]) -> Graph:
    """Returns the function of one step. `types` are those of h, c, the gates of x over all steps, and the constants
    that all steps read."""
    names = ("h", "c", "x", "weight", "inverse")
    b = Builder(f"lstm_{types[0].width}{wide(bits)}_rounded.step")
    h, c, x, weight, inverse = (
        b.input(name, TensorType((type.shape[0], 1, type.width) if name == "x" else type.shape, type.dtype))
        for name, type in zip(names, types, strict=True)
    )
    rounded = b.add("recurrent.h", RoundRows(bits), (h, inverse))
    gates = b.add("recurrent.gates", Linear(), (rounded, weight))
    sums = b.add("recurrent.sums", SUM, (gates, b.add("recurrent.x", Last(), (x,))))
    update = b.add("recurrent.update", LstmGates(), (sums, c))
    y = b.add("recurrent.y", AsStep(), (update,))
    return b.build({"next_h": update, "next_c": f"{update}:1", "y": y})


def cells_apart(graph: Graph, wanted: Container[str]) -> Graph:
    """Returns the graph with each `LstmCell` whose input weight, a ref, is in `wanted` split into its two
    products and the op of the gates."""
    nodes = []
    for node in graph.nodes:
        nodes += _cell(graph, node) if isinstance(node.op, LstmCell) and node.inputs[3] in wanted else [node]
    return replace(graph, nodes=tuple(nodes))


def _cell(graph: Graph, node: Node) -> list[Node]:
    x, h, c, into, hidden, *biases = node.inputs
    scope, types, made = node.name.rpartition(".")[0], dict(graph.types), list[Node]()

    def add(name: str, op: Op, *inputs: str) -> str:
        made.append(Node(name, op, inputs, op.infer([types[ref] for ref in inputs])))
        types.update(zip(made[-1].outputs, made[-1].types, strict=True))
        return name

    gates = add(f"{scope}.gates_x", Linear(), x, into)
    for i, bias in enumerate(biases):
        gates = add(f"{scope}.gates_biased{i or ''}", BIASED, gates, bias)
    sums = add(f"{scope}.sums", SUM, add(f"{scope}.gates_h", Linear(), h, hidden), add(f"{scope}.row", Last(), gates))
    add(node.name, LstmGates(), sums, c)
    return made
