"""The value of the previous token, from a shift of the whole sequence or from the state in decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import Input, Op, Sizes, TensorType, Traced, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Previous(Op):
    """Shifts x [B, T, ...] by one token: row t has x of token t - 1, and the first row is `fill`."""

    name: ClassVar[str] = "previous"
    keeps_features: ClassVar[bool] = True
    fill: int = 0

    @property
    def arity(self) -> int:
        return 1

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("previous",)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs[0].shape) < 2:
            raise TypeRuleError(f"takes [B, T, ...], not {inputs[0]}", (0,))
        return (inputs[0],)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        value = f", value={self.fill}" if self.fill else ""
        return f"F.pad({args[0]}, {self._pads(inputs[0])}{value})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        keywords = (("value", self.fill),) if self.fill else ()
        return Traced("pad", (Input(0), self._pads(inputs[0])), keywords)

    @staticmethod
    def _pads(x: TensorType) -> tuple[int, ...]:
        """Returns the padding, last dim first, that adds a row before the first token and drops the last row."""
        return (0, 0) * (len(x.shape) - 2) + (1, -1)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        shifted = torch.full_like(inputs[0], self.fill)
        for t in range(1, inputs[0].shape[1]):
            shifted[:, t] = inputs[0][:, t - 1]
        return shifted


@dataclass(frozen=True, slots=True)
class PreviousKept(Op):
    """Previous for decoding: the tokens follow `start` (i64[]) earlier tokens.

    The first row is the state `kept` [B, 1, ...], the value of the last earlier token, or `fill` if `start` is 0.
    """

    name: ClassVar[str] = "previous_kept"
    keeps_features: ClassVar[bool] = True
    inline: ClassVar[bool] = False  # the state is overwritten after this node
    fill: int = 0

    @property
    def arity(self) -> int:
        return 3

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("previous",)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, state, _ = inputs
        _check_kept(x, state, (0, 1))
        return (x,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"previous_kept({', '.join(args)}, {self.fill})"

    def support(self, inputs: Sequence[TensorType]) -> str:
        return "previous_kept"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("previous_kept", (Input(0), Input(1), Input(2), self.fill))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x, state, start = inputs
        shifted = Previous(self.fill).reference(x)
        if int(start) > 0:
            shifted[:, 0] = state[:, 0]  # type: ignore[index]
        return shifted


@dataclass(frozen=True, slots=True)
class KeepLast(Op):
    """Overwrites the state `kept` [B, 1, ...] in place with the last token of x [B, T, ...]."""

    name: ClassVar[str] = "keep_last"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        state, x = inputs
        _check_kept(x, state, (0, 1))
        return (state,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{args[0]}.copy_({args[1]}[:, -1:])"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        last = Traced("getitem", (Input(1), (slice(None), slice(-1, None))))
        return Traced("copy_", (Input(0), last))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        _, x = inputs
        return x.select(1, x.shape[1] - 1).unsqueeze(1).clone()


@dataclass(frozen=True, slots=True)
class Reset(Op):
    """Replaces x [B, T, ...] by `fill` at positions where ids [B, T] equal `token`, the mark that starts a document."""

    name: ClassVar[str] = "reset"
    keeps_features: ClassVar[bool] = True
    token: int
    fill: int = 0

    @property
    def arity(self) -> int:
        return 2

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("previous",)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, ids = inputs
        if x.shape[:2] != ids.shape:
            raise TypeRuleError(f"resets {x} where ids {ids} say so", (0, 1))
        return (x,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        starts = f"{args[1]} == {self.token}"
        if dims := len(inputs[0].shape) - 2:
            starts = f"({starts})[..., {', '.join(['None'] * dims)}]"
        return f"{args[0]}.masked_fill({starts}, {self.fill})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        starts = Traced("eq", (Input(1), self.token))
        if dims := len(inputs[0].shape) - 2:
            starts = Traced("getitem", (starts, (Ellipsis, *[None] * dims)))
        return Traced("masked_fill", (Input(0), starts, self.fill))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x, ids = inputs
        output = x.clone()
        for row, token in (ids == self.token).nonzero().tolist():
            output[row, token] = self.fill
        return output


def _check_kept(x: TensorType, state: TensorType, at: tuple[int, ...]) -> None:
    if state.shape != (x.shape[0], 1, *x.shape[2:]) or state.dtype != x.dtype:
        raise TypeRuleError(f"keeps {state} of {x}", at)
