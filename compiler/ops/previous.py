"""The value of the previous token: by a shift of a whole sequence, or from a state in decoding."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import SupportCall
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record


@record
class Previous(Moves):
    """Shifts x [B, T, ...] by one token: row t has x of token t - 1, and the first row is `fill`."""

    name: ClassVar[str] = "previous"
    always_stored: ClassVar[bool] = True
    keeps_features: ClassVar[bool] = True
    output_labels: ClassVar[tuple[str, ...]] = ("previous",)
    fill: int = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs[0].shape) < 2:
            raise TypeRuleError(f"takes [B, T, ...], not {inputs[0]}", (0,))
        return (inputs[0],)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        # F.pad lists the last dim first: this adds a row at the front and removes the last row
        pads = (0, 0) * (len(inputs[0].shape) - 2) + (1, -1)
        return TorchCall("F.pad", (Input(0), pads), (("value", self.fill),) if self.fill else ())

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        shifted = torch.full_like(inputs[0], self.fill)
        for t in range(1, inputs[0].shape[1]):
            shifted[:, t] = inputs[0][:, t - 1]
        return shifted


@record
class PreviousCached(SupportCall, Moves):
    """Shifts x [B, T, ...] by one token in decoding. `start` (i64[]) is the number of tokens before the input tokens.

    The first row is the state [B, 1, ...], the value of the last token before the input tokens. If `start` is 0, the
    first row is `fill` instead.
    """

    name: ClassVar[str] = "previous_cached"
    keeps_features: ClassVar[bool] = True
    inline: ClassVar[bool] = False  # the state is overwritten after this node
    arity: ClassVar[int] = 3
    output_labels: ClassVar[tuple[str, ...]] = ("previous",)
    fill: int = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, state, _ = inputs
        _check_state(x, state)
        return (x,)

    def reference(self, *inputs: Tensor) -> Tensors:
        x, state, start = inputs
        shifted = Previous(self.fill).reference(x)
        if int(start) > 0:
            shifted[:, 0] = state[:, 0]  # type: ignore[index]
        return shifted


class KeepLast(Moves):
    """Overwrites the state [B, 1, ...] in place with the last token of x [B, T, ...]."""

    name: ClassVar[str] = "keep_last"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        state, x = inputs
        _check_state(x, state)
        return (state,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".copy_", (Input(0), TorchCall("[]", (Input(1), (slice(None), slice(-1, None))))))

    def reference(self, *inputs: Tensor) -> Tensors:
        _, x = inputs
        return x.select(1, x.shape[1] - 1).unsqueeze(1).clone()


@record
class Reset(Moves):
    """Replaces x [B, T, ...] by `fill` where ids [B, T] equal `token`, the marker that begins a document."""

    name: ClassVar[str] = "reset"
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 2
    output_labels: ClassVar[tuple[str, ...]] = ("previous",)
    token: int
    fill: int = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, ids = inputs
        if x.shape[:2] != ids.shape:
            raise TypeRuleError(f"needs one id per row of {x}, not {ids}", (0, 1))
        return (x,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        starts = TorchCall("==", (Input(1), self.token))
        if dims := len(inputs[0].shape) - 2:
            starts = TorchCall("[]", (starts, (..., *[None] * dims)))
        return TorchCall(".masked_fill", (Input(0), starts, self.fill))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, ids = inputs
        output = x.clone()
        for row, token in (ids == self.token).nonzero().tolist():
            output[row, token] = self.fill
        return output


def _check_state(x: TensorType, state: TensorType) -> None:
    if state.shape != (x.shape[0], 1, *x.shape[2:]) or state.dtype != x.dtype:
        raise TypeRuleError(f"needs a state of one row like {x}, not {state}", (0, 1))
