"""Operations on sequences in encoder-decoder models: shifts, masks, states and time steps."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record


@record
class Seen(Moves):
    """The padding mask bool[B, S] of ids i64[B, S]: True for tokens, False for `pad`."""

    name: ClassVar[str] = "seen"
    inline: ClassVar[bool] = False
    pad: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, "bool"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("!=", (Input(0), self.pad))

    def reference(self, *inputs: Tensor) -> Tensors:
        return (inputs[0] - self.pad).bool()


@record
class Shift(Moves):
    """The decoder inputs for teacher forcing: `start`, then all target ids i64[B, T] except the last."""

    name: ClassVar[str] = "shift"
    inline: ClassVar[bool] = False
    start: int

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        cut = TorchCall("[]", (Input(0), (slice(None), slice(None, -1))))
        return TorchCall("F.pad", (cut, (1, 0)), (("value", self.start),))

    def reference(self, *inputs: Tensor) -> Tensors:
        shifted = inputs[0].roll(1, 1)
        shifted[:, 0] = self.start
        return shifted


@record
class Zeros(Moves):
    """An initial state: zeros [B, *shape] in the dtype of x [B, ...]."""

    name: ClassVar[str] = "zeros"
    inline: ClassVar[bool] = False
    shape: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0].with_shape(inputs[0].shape[0], *self.shape),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        rows = TorchCall("[]", (TorchCall(".", (Input(0), "shape")), 0))
        return TorchCall(".new_zeros", (Input(0), rows, *map(int, self.shape)))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.zeros((inputs[0].shape[0], *self.shape), dtype=inputs[0].dtype, device=inputs[0].device)


class StateWrite(Moves):
    """Overwrites the first input, the state, in place with the second input. Both inputs have the same shape."""

    name: ClassVar[str] = "state_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        state, value = inputs
        if state.shape != value.shape:
            raise TypeRuleError(f"cannot overwrite the state {state} with {value}: the types differ", (0, 1))
        return (state,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".copy_", (Input(0), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[1].clone()


class Copy(Moves):
    """Copies a value, so that in-place changes of the copy do not affect the original."""

    name: ClassVar[str] = "copy"
    inline: ClassVar[bool] = False

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".clone", (Input(0),))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0] + 0


class Concat(Moves):
    """Concatenates features: [..., D1] and [..., D2] become [..., D1 + D2]."""

    name: ClassVar[str] = "concat"
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        first, second = inputs
        if first.shape[:-1] != second.shape[:-1]:
            raise TypeRuleError(f"concatenates the features of {first} and {second}, which differ in rows", (0, 1))
        assert isinstance(first.width, int) and isinstance(second.width, int)
        return (first.with_shape(*first.shape[:-1], first.width + second.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("torch.cat", ((Input(0), Input(1)), -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        first, second = inputs
        joined = first.new_empty((*first.shape[:-1], first.shape[-1] + second.shape[-1]))
        joined[..., : first.shape[-1]], joined[..., first.shape[-1] :] = first, second
        return joined


class Reversed(Moves):
    """Reverses x [B, T, D] in time, including padding."""

    name: ClassVar[str] = "reversed"

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".flip", (Input(0), 1))

    def reference(self, *inputs: Tensor) -> Tensors:
        x = inputs[0]
        return x[:, [x.shape[1] - 1 - t for t in range(x.shape[1])]]


class AsStep(Moves):
    """Returns features [B, D] as a sequence of one step, [B, 1, D]."""

    name: ClassVar[str] = "as_step"
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        rows, width = inputs[0].shape
        return (inputs[0].with_shape(rows, 1, width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".unsqueeze", (Input(0), 1))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].reshape(inputs[0].shape[0], 1, -1)


class Repeat(Moves):
    """Repeats features [B, D] at every position of ids i64[B, T]: [B, T, D]."""

    name: ClassVar[str] = "repeat"
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, ids = inputs
        return (x.with_shape(x.shape[0], ids.shape[1], x.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        length = TorchCall("[]", (TorchCall(".", (Input(1), "shape")), 1))
        return TorchCall(".expand", (TorchCall(".unsqueeze", (Input(0), 1)), -1, length, -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x, ids = inputs
        return torch.stack([x] * ids.shape[1], 1)
