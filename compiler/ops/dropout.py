"""Dropout (Srivastava et al., 2014)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.op import ADDED, Gradients, Op, Tape
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STORAGE = "draw"  # the storage format that marks the buffers that determine the random numbers of a node
# The key, the index of the first sequence, the step between sequences, the tokens per sequence
DRAW = TensorType((4,), "i64", STORAGE)
PHILOX = 0xD256D193, 0x9E3779B9  # the multiplier of a round, and the increment of the key
ROUNDS = 7  # the fewest rounds that pass all tests of BigCrush, a test suite for random numbers


@record
class Dropout(Op):
    """Sets each element of x to 0 with probability `p`, and divides the other elements by 1 - p. The op occurs only in
    training programs.

    By default, the random numbers come from Torch's generator of the device, in program order. The reference uses the
    same generator.

    With `counted`, the random numbers come from Philox2x32-7 (Salmon et al., 2011), a function of a key, a row and a
    column. A row is the index of a token in the batch of the whole step, not in the micro-batch. A second input of type
    DRAW holds the key and the rows of the batch. The gradient recomputes the numbers, so no mask is stored.
    """

    name: ClassVar[str] = "dropout"
    linear_in: ClassVar[int] = 1
    inline: ClassVar[bool] = False  # random numbers must be drawn in program order
    keeps_features: ClassVar[bool] = True
    homogeneous: ClassVar[bool] = True
    joined_when: ClassVar[str] = "the kernel of a product draws dropout only if nothing else reads the product"
    p: float
    counted: bool = field(default=False, metadata=ADDED)

    @property
    def arity(self) -> int:
        return 2 if self.counted else 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if self.counted and inputs[1] != DRAW:
            raise TypeRuleError(f"needs a random state of type {DRAW} as its second input, not {inputs[1]}", (1,))
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        if self.counted:
            return TorchCall("counted_dropout", (Input(0), Input(1), self.p))
        return TorchCall("F.dropout", (Input(0), self.p))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x = inputs[0]
        if not self.counted:
            return x * torch.empty_like(x).bernoulli_(1 - self.p) / (1 - self.p)
        return x * mask(x.shape, inputs[1], self.p).to(x.device) / (1 - self.p)

    def derivative(self, tape: Tape) -> Gradients | None:
        if not self.counted:
            return None
        return tape.add("grad", self, (tape.grad(), tape.input(1))), None


def mask(shape: Sequence[int], draw: Tensor, p: float) -> Tensor:
    """Returns a bool tensor of `shape` on the CPU. An element is False if dropout with the buffer `draw` sets it to
    0."""
    import torch

    key, first, step, tokens = draw.tolist()
    rows = [(first + m // tokens * step) * tokens + m % tokens for m in range(math.prod(shape[:-1]))]
    return torch.from_numpy(philox(key, rows, shape[-1]) >= least_word(p)).view(*shape)


def least_word(p: float) -> int:
    """Returns a threshold for random 32-bit words. An element is set to 0 if the word of the element is below the
    threshold."""
    return int(p * 2**32)


def begin_draw(draw: Tensor, window: int) -> None:
    """Fills the random state of a node for one batch: the key is 0, and each sequence has `window` tokens."""
    draw.data.copy_(draw.new_tensor([0, 0, 1, window]))


def philox(key: int, rows: Sequence[int], columns: int) -> npt.NDArray[np.uint64]:
    """Returns the first output word of Philox2x32-7 for each row and column, below 2^32: [rows, columns].

    The counter is the column and the low 32 bits of the row. The key of the generator is the low half of `key`. The
    high half of `key` is combined with the row by exclusive or.
    """
    import numpy as np

    low, bits = np.uint64(2**32 - 1), np.uint64(32)
    row, column = np.meshgrid(np.array(rows, np.uint64), np.arange(columns, dtype=np.uint64), indexing="ij")
    c0, c1, k = column, (row ^ np.uint64(key >> 32)) & low, key & (2**32 - 1)
    for _ in range(ROUNDS):
        product = c0 * np.uint64(PHILOX[0])
        c0, c1 = (product >> bits) ^ c1 ^ np.uint64(k), product & low
        k = (k + PHILOX[1]) % 2**32
    return c0
