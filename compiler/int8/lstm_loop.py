"""The loop over the steps of one LSTM direction, in int8 and fake-quantized models."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specc.compiler.int8.editor import Editor
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.region import Scan, returned
from specc.compiler.ops.sequence import AsStep, Reversed


class Step(NamedTuple):
    """One step of an LSTM.

    Attributes:
        suffix: The suffix of the function name, for this kind of step.
        constants: The references of the values that every step reads, by the name of the step's input.
        update: A function that adds the ops of a step: (builder, h, c, gates of the step, constants) -> the next h. The
            next c is the second output of the node that computes the next h.
    """

    suffix: str
    constants: Mapping[str, str]
    update: Callable[[Builder, str, str, str, Sequence[str]], str]


def add_loop(
    edit: Editor, node: Node, name: str, inputs: Sequence[str], step: Step, backward: bool
) -> tuple[str, str, str]:
    """Adds a loop over the steps of one direction.

    Args:
        edit: The editor of the graph.
        node: The original LSTM node. New nodes are inserted at its position.
        name: The prefix of the names of new nodes.
        inputs: The references of x, the initial h, the initial c, and the contribution of x to the gates. This
            contribution is in the order of the steps.
        step: The step.
        backward: Whether the direction runs backward in time.

    Returns:
        Refs of y [B, T, H] and of the final h and c.
    """
    x, *values = inputs
    read = (*values, *step.constants.values())
    h, c = (edit.types[ref] for ref in values[:2])
    types = (h, c, edit.types[x].with_shape(*edit.types[x].shape[:-1], h.width))
    scope, _, word = name.rpartition(".")
    at = f"{scope}.{'back_' if backward else ''}steps"
    callee = edit.function(_function(edit, read, step))
    op = Scan(callee, at, 2, 1, returned(types), tuple(f"{word}_{output}" for output in "hcy"))
    loop = edit.add(Node(f"{name}_loop", op, read, types), node)
    y = edit.add_op(f"{name}_y", Reversed(), (f"{loop}:2",), node) if backward else f"{loop}:2"
    return y, loop, f"{loop}:1"


def _function(edit: Editor, read: Sequence[str], step: Step) -> Graph:
    b = Builder(f"lstm_{edit.types[read[0]].width}{step.suffix}.step")
    for name, ref in zip(("h", "c", "x", *step.constants), read, strict=True):
        type = edit.types[ref]
        b.input(name, type.with_shape(type.shape[0], 1, type.width) if name == "x" else type)
    update = step.update(b, "h", "c", "x", list(step.constants))
    y = b.add("recurrent.y", AsStep(), (update,))
    return b.build({"next_h": update, "next_c": f"{update}:1", "y": y})
