"""First positions of documents in a token stream. Each document begins with a marker token."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import SupportCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record


@record
class DocumentStarts(SupportCall, Moves):
    """For each token of ids [B, T], the position at which the token's document begins, i64[B, T]. A document begins at
    a token `mark`. Tokens before the first `mark` belong to a document that begins at 0.
    """

    name: ClassVar[str] = "document_starts"
    inline: ClassVar[bool] = False
    output_labels: ClassVar[tuple[str, ...]] = ("starts",)
    mark: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs[0].shape) != 2:
            raise TypeRuleError(f"takes ids [B, T], not {inputs[0]}", (0,))
        return (inputs[0],)

    def reference(self, *inputs: Tensor) -> Tensors:
        return _starts(inputs[0], self.mark, [0] * len(inputs[0]), 0)


@record
class DocumentStartsCached(SupportCall, Moves):
    """For each token of ids [B, T] in decoding, the position at which the token's document begins. The third input,
    `start` (i64[]), is the number of earlier tokens of the text. These tokens have the positions 0 to `start` - 1.

    The second input i64[B, 1] is the state: the first position of the document that contains the last earlier token. If
    `start` is 0, the op ignores the state.
    """

    name: ClassVar[str] = "document_starts_cached"
    inline: ClassVar[bool] = False  # the state is overwritten after this node
    arity: ClassVar[int] = 3
    output_labels: ClassVar[tuple[str, ...]] = ("starts",)
    mark: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        ids, state, _ = inputs
        if len(ids.shape) != 2 or state.shape != (ids.shape[0], 1):
            raise TypeRuleError(f"needs a state [B, 1] for ids {ids}, not {state}", (0, 1))
        return (ids,)

    def reference(self, *inputs: Tensor) -> Tensors:
        ids, state, start = inputs
        before = int(start)
        return _starts(ids, self.mark, state[:, 0].tolist() if before else [0] * len(ids), before)


def _starts(ids: Tensor, mark: int, first: Sequence[int], before: int) -> Tensor:
    starts = ids.clone()
    for row, start in enumerate(first):
        for token in range(ids.shape[1]):
            start = before + token if int(ids[row, token]) == mark else start
            starts[row, token] = start
    return starts
