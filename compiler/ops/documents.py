"""Start positions of documents in a token stream in which a mark precedes each document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Input, Op, Sizes, TensorType, Traced, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DocumentStarts(Op):
    """The start position, i64[B, T], of the document of each token of ids [B, T].

    A document starts at the position of the last `mark` up to and including the token, or at 0 if there is none.
    """

    name: ClassVar[str] = "document_starts"
    inline: ClassVar[bool] = False
    mark: int

    @property
    def arity(self) -> int:
        return 1

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("starts",)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs[0].shape) != 2:
            raise TypeRuleError(f"takes ids [B, T], not {inputs[0]}", (0,))
        return (inputs[0],)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"document_starts({args[0]}, {self.mark})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "document_starts"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("document_starts", (Input(0), self.mark))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return _starts(inputs[0], self.mark, [0] * len(inputs[0]), 0)


@dataclass(frozen=True, slots=True)
class DocumentStartsKept(Op):
    """DocumentStarts for decoding: the tokens follow `start` (i64[]) earlier tokens, and positions include them.

    The second input i64[B, 1] is the state: the start position of the document of the last earlier token. It is ignored
    if `start` is 0.
    """

    name: ClassVar[str] = "document_starts_kept"
    inline: ClassVar[bool] = False  # the state is overwritten after this node
    mark: int

    @property
    def arity(self) -> int:
        return 3

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("starts",)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        ids, state, _ = inputs
        if len(ids.shape) != 2 or state.shape != (ids.shape[0], 1):
            raise TypeRuleError(f"keeps {state} of ids {ids}", (0, 1))
        return (ids,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"document_starts_kept({', '.join(args)}, {self.mark})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "document_starts_kept"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("document_starts_kept", (Input(0), Input(1), Input(2), self.mark))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        ids, state, start = inputs
        before = int(start)
        return _starts(ids, self.mark, state[:, 0].tolist() if before else [0] * len(ids), before)


def _starts(ids: "Tensor", mark: int, first: Sequence[int], before: int) -> "Tensor":
    starts = ids.clone()
    for row, start in enumerate(first):
        for token in range(ids.shape[1]):
            start = before + token if int(ids[row, token]) == mark else start
            starts[row, token] = start
    return starts
