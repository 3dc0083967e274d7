"""Ops that run another graph: a function call, a fused group, a loop over time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from specc.compiler.ir.graph import Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.records import record

STEP, TRAIN_STEP = "step", "train_step"  # the methods of a loop over time, without and with dropout
Types = tuple[tuple[tuple[int | str, ...], str], ...]


class Region(Op):
    """The base class of ops that run another graph.

    `returns` states the shapes and dtypes of the outputs, and `labels` states their names in generated code.
    """

    arity: ClassVar[int] = 0
    flops_per_output: ClassVar[int] = 0
    returns: Types
    labels: tuple[str, ...]

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return tuple(TensorType(shape, dtype) for shape, dtype in self.returns)


@record
class Call(Region):
    """Calls function `callee`.

    Attributes:
        callee: the name of the function.
        at: the path of the call in the model. The names of the parameters begin with this path.
        returns: the shapes and dtypes of the outputs.
        scalars: the numbers that the caller passes, by name.
        labels: the names of the outputs in generated code.
        formulas: the names and formulas of the scalars that the spec states as formulas.
    """

    name: ClassVar[str] = "call"
    inline: ClassVar[bool] = False
    callee: str
    at: str
    returns: Types
    scalars: tuple[tuple[str, float], ...] = ()
    labels: tuple[str, ...] = ()
    formulas: tuple[tuple[str, str], ...] = ()

    def retyped(self, change: Callable[[TensorType], TensorType]) -> Op:
        return replace(self, returns=returned(list(map(change, self.infer(())))))


def calling(node: Node, names: Mapping[str, str]) -> Node:
    """Returns a copy of the node that calls the function by a new name. `names` maps the old names of functions to new
    names. A node that calls no function in `names` is returned unchanged."""
    if not isinstance(node.op, Call) or node.op.callee not in names:
        return node
    return replace(node, op=replace(node.op, callee=names[node.op.callee]))


@record
class Fused(Region):
    """Runs a fused group. A group has a forward graph, and a backward graph composed of the derivative rules of the
    group's nodes. See passes/group.py."""

    name: ClassVar[str] = "fused"
    group: str
    returns: Types
    labels: tuple[str, ...] = ()

    def retyped(self, change: Callable[[TensorType], TensorType]) -> Op:
        return replace(self, returns=returned(list(map(change, self.infer(())))))


@record
class Scan(Region):
    """Runs function `callee` once per time step. The first `carried` outputs of a step are the first inputs of the
    next step.

    Inputs are the initial carried values, then `stepped` sequences [B, T, ...], then the values that all steps read.
    Step t receives the slice [B, 1, ...] of each sequence. Outputs are the last carried values, then the other
    outputs, concatenated along time.
    """

    name: ClassVar[str] = "scan"
    apart: ClassVar[bool] = True
    unexportable: ClassVar[str] = "a loop over tokens: an exported program would have a fixed number of steps"
    inline: ClassVar[bool] = False
    callee: str
    at: str
    carried: int
    stepped: int
    returns: Types
    labels: tuple[str, ...] = ()

    @property
    def drops(self) -> bool:
        """Whether the step function has dropout. Only training programs have such a step function."""
        return self.callee.rpartition(".")[2] == TRAIN_STEP

    def retyped(self, change: Callable[[TensorType], TensorType]) -> Op:
        return replace(self, returns=returned(list(map(change, self.infer(())))))


def returned(types: Sequence[TensorType]) -> Types:
    """Converts types to pairs of a shape and a dtype, as in `Call.returns`."""
    return tuple((type.shape, type.dtype) for type in types)
