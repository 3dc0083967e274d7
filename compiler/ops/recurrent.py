"""Long short-term memory (Hochreiter and Schmidhuber, 1997), over a whole sequence or one step.

The gates are in the order i (input), f (forget), g (cell), o (output). Torch's LSTM computes whole sequences.
"""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record

GATES = 4
SAVED = GATES + 2  # values per output that the backward pass reads: the gates, c and tanh(c)


def _check(x: TensorType, h: TensorType, c: TensorType, weights: Sequence[TensorType]) -> int:
    into, hidden, *_ = weights
    size = hidden.width
    assert isinstance(size, int)
    if into.width != x.width:
        raise TypeRuleError(f"takes {into.width} features but {{input}} gives {x.width}", (0,))
    if any(weight.shape[0] != GATES * size for weight in weights):
        shown = ", ".join(map(str, weights))
        raise TypeRuleError(f"needs weights for gates of {size} features, not {shown}")
    if h.shape != c.shape:
        raise TypeRuleError(f"needs h and c of equal shape, not {h} and {c}", (1, 2))
    return size


def _step(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    into, hidden, *biases = weights
    return updated(x @ into.T + h @ hidden.T + sum(biases), c)


def updated(sums: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the new h and c [..., H] from the gate sums [..., 4H] and the old c [..., H]."""
    i, f, g, o = sums.chunk(GATES, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@record
class Lstm(Op):
    """Runs x [B, T, D] through an LSTM. With `directions` 2, a second LSTM runs backward in time.

    Inputs are x, the initial h and c [B, directions * H], then the weights of each direction: input weights [4H, D],
    hidden weights [4H, H], and `biases` bias vectors [4H]. Outputs are y [B, T, directions H] and the last h and c.
    Each output concatenates the features of both directions.
    """

    name: ClassVar[str] = "lstm"
    apart: ClassVar[bool] = True
    unexportable: ClassVar[str] = "a loop over tokens: an exported program would have a fixed number of steps"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "recurrence"
    output_labels: ClassVar[tuple[str, ...]] = ("y", "h", "c")
    directions: int = 1
    biases: int = 1

    @property
    def arity(self) -> int:
        return 3 + self.directions * (2 + self.biases)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, h, c, *weights = inputs
        each = 2 + self.biases
        sizes = [_check(x, h, c, weights[i : i + each]) for i in range(0, len(weights), each)]
        if len(inputs) != self.arity or h.width != sum(sizes):
            raise TypeRuleError(f"needs an initial h of {sum(sizes)} features, not {h}", (1,))
        return x.with_shape(*x.shape[:-1], sum(sizes)), h, c

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x = inputs[0]
        matrices = sum(weight.count(sizes) for weight in inputs[3:] if len(weight.shape) == 2)
        return 2 * x.with_shape(*x.shape[:-1]).count(sizes) * matrices

    def saved_inside(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return SAVED * outputs[0].bytes(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        state, weights = map(Input, range(3)), map(Input, range(3, self.arity))
        return TorchCall("lstm" if self.biases == 2 else "lstm_one_bias", (*state, self.directions, *weights))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x, h, c, *weights = inputs
        each, sides = 2 + self.biases, []
        starts = zip(h.chunk(self.directions, -1), c.chunk(self.directions, -1), strict=True)
        for d, start in enumerate(starts):
            (h, c), outputs = start, []
            for t in range(x.shape[1]) if d == 0 else reversed(range(x.shape[1])):
                h, c = _step(x[:, t], h, c, weights[d * each : (d + 1) * each])
                outputs.append(h)
            sides.append((torch.stack(outputs if d == 0 else outputs[::-1]), h, c))
        y, h, c = (torch.cat(parts, -1) for parts in zip(*sides, strict=True))
        return y.transpose(0, 1), h, c


@record
class LstmCell(Op):
    """Runs one step of an LSTM. Outputs are the new h and c [B, H].

    Inputs are x [B, 1, D], h and c [B, H], and the weights of one direction as in `Lstm`.
    """

    name: ClassVar[str] = "lstm_cell"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "recurrence"
    output_labels: ClassVar[tuple[str, ...]] = ("h", "c")
    biases: int = 1

    @property
    def arity(self) -> int:
        return 5 + self.biases

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, h, c, *weights = inputs
        size = _check(x, h, c, weights)
        if x.shape[1] != 1 or h.width != size:
            raise TypeRuleError(f"takes one step, and h of {size} features, not x {x} and h {h}", (0, 1))
        return h, c

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, _, _, *weights = inputs
        matrices = sum(weight.count(sizes) for weight in weights[:2])
        return 2 * x.with_shape(x.shape[0]).count(sizes) * matrices

    def saved_inside(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return SAVED * outputs[0].bytes(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(
            "lstm_cell" if self.biases == 2 else "lstm_cell_one_bias", tuple(map(Input, range(self.arity)))
        )

    def reference(self, *inputs: Tensor) -> Tensors:
        x, h, c, *weights = inputs
        return _step(x[:, 0], h, c, weights)
