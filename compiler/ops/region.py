"""Nodes that run another graph: a function called at a place, a fused group, a loop over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.graph import Input, Op, Sizes, TensorType, Traced

STEP, TRAIN_STEP = "step", "train_step"  # methods of a loop over time: the second is there where training drops
Types = tuple[tuple[tuple[int | str, ...], str], ...]


@dataclass(frozen=True, slots=True)
class Call(Op):
    """Runs function `callee` with the parameters that stand under `at`, and with `scalars` for the numbers that it
    takes from its caller, of which `formulas` has what the spec says. `returns` are the shapes and dtypes that it
    gives back, `labels` what code calls them."""

    name: ClassVar[str] = "call"
    inline: ClassVar[bool] = False
    callee: str
    at: str
    returns: Types
    scalars: tuple[tuple[str, float], ...] = ()
    labels: tuple[str, ...] = ()
    formulas: tuple[tuple[str, str], ...] = ()

    @property
    def arity(self) -> int:
        return 0

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return tuple(TensorType(shape, dtype) for shape, dtype in self.returns)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Fused(Op):
    """A fused group: its forward graph, and a backward composed from its members' rules. See passes/group.py."""

    name: ClassVar[str] = "fused"
    group: str
    returns: Types

    @property
    def arity(self) -> int:
        return 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return tuple(TensorType(shape, dtype) for shape, dtype in self.returns)

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced(self.group, tuple(map(Input, range(len(inputs)))))

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Scan(Op):
    """Runs function `callee` once for each step of time; its first `carried` outputs are the next step's first inputs.

    Inputs are the first carried values, then `stepped` sequences [B, T, ...], of which each step is given its own
    [B, 1, ...], then what all steps read. Outputs are the last carried values and the other outputs of all steps, one
    behind the other.
    """

    name: ClassVar[str] = "scan"
    apart: ClassVar[bool] = True
    inline: ClassVar[bool] = False
    callee: str
    at: str
    carried: int
    stepped: int
    returns: Types
    labels: tuple[str, ...] = ()

    @property
    def arity(self) -> int:
        return 0

    @property
    def drops(self) -> bool:
        """Whether its step is one of training alone."""
        return self.callee.rpartition(".")[2] == TRAIN_STEP

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return tuple(TensorType(shape, dtype) for shape, dtype in self.returns)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0


def returned(types: Sequence[TensorType]) -> Types:
    """The form in which a region states the types it gives back."""
    return tuple((type.shape, type.dtype) for type in types)
