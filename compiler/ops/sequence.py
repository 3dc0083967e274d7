"""Sequence operations of encoder-decoder models: shifts, masks, states, time steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.graph import Dim, Input, Op, Sizes, TensorType, Traced, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moves(Op):
    """Base of ops that move values and do no arithmetic."""

    @property
    def arity(self) -> int:
        return 1

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Seen(Moves):
    """The padding mask bool[B, S] of ids i64[B, S]: True for tokens, False for `pad`."""

    name: ClassVar[str] = "seen"
    inline: ClassVar[bool] = False
    pad: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType(inputs[0].shape, "bool"),)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])} != {self.pad}"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("ne", (Input(0), self.pad))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return (inputs[0] - self.pad).bool()


@dataclass(frozen=True, slots=True)
class Shift(Moves):
    """The decoder inputs for teacher forcing: `start`, then all but the last of ids i64[B, T]."""

    name: ClassVar[str] = "shift"
    inline: ClassVar[bool] = False
    start: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"F.pad({operand(args[0])}[:, :-1], (1, 0), value={self.start})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        cut = Traced("getitem", (Input(0), (slice(None), slice(None, -1))))
        return Traced("pad", (cut, (1, 0)), (("value", self.start),))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        shifted = inputs[0].roll(1, 1)
        shifted[:, 0] = self.start
        return shifted


@dataclass(frozen=True, slots=True)
class Zeros(Moves):
    """Zeros [B, *shape] in the dtype of x [B, ...]: an empty state."""

    name: ClassVar[str] = "zeros"
    inline: ClassVar[bool] = False
    shape: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0].with_shape(inputs[0].shape[0], *self.shape),)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        x = operand(args[0])
        return f"{x}.new_zeros({x}.shape[0], {', '.join(map(str, self.shape))})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        rows = Traced("getitem", (Traced("getattr", (Input(0), "shape")), 0))
        return Traced("new_zeros", (Input(0), rows, *self.shape))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        return torch.zeros((inputs[0].shape[0], *self.shape), dtype=inputs[0].dtype, device=inputs[0].device)


@dataclass(frozen=True, slots=True)
class StateWrite(Moves):
    """Replaces the state, the first input, in place by the second input, which has the same shape."""

    name: ClassVar[str] = "state_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        state, value = inputs
        if state.shape != value.shape:
            raise TypeRuleError(f"keeps {state} but is given {value}", (0, 1))
        return (state,)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.copy_({args[1]})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("copy_", (Input(0), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[1].clone()


@dataclass(frozen=True, slots=True)
class Copy(Moves):
    """Copies a value, so that in-place changes of the copy do not affect the original."""

    name: ClassVar[str] = "copy"
    inline: ClassVar[bool] = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.clone()"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("clone", (Input(0),))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0] + 0


@dataclass(frozen=True, slots=True)
class Concat(Moves):
    """Concatenates features: [..., D1] and [..., D2] become [..., D1 + D2]."""

    name: ClassVar[str] = "concat"

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        first, second = inputs
        if first.shape[:-1] != second.shape[:-1]:
            raise TypeRuleError(f"puts {first} beside {second}", (0, 1))
        assert isinstance(first.width, int) and isinstance(second.width, int)
        return (first.with_shape(*first.shape[:-1], first.width + second.width),)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"torch.cat(({', '.join(args)}), -1)"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("cat", ((Input(0), Input(1)), -1))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        first, second = inputs
        joined = first.new_empty((*first.shape[:-1], first.shape[-1] + second.shape[-1]))
        joined[..., : first.shape[-1]], joined[..., first.shape[-1] :] = first, second
        return joined


@dataclass(frozen=True, slots=True)
class Reversed(Moves):
    """Reverses x [B, T, D] in time, including padding."""

    name: ClassVar[str] = "reversed"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.flip(1)"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("flip", (Input(0), 1))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x = inputs[0]
        return x[:, [x.shape[1] - 1 - t for t in range(x.shape[1])]]


@dataclass(frozen=True, slots=True)
class AsStep(Moves):
    """Returns features [B, D] as a sequence of one step, [B, 1, D]."""

    name: ClassVar[str] = "as_step"
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        rows, width = inputs[0].shape
        return (inputs[0].with_shape(rows, 1, width),)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.unsqueeze(1)"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("unsqueeze", (Input(0), 1))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].reshape(inputs[0].shape[0], 1, -1)


@dataclass(frozen=True, slots=True)
class Repeat(Moves):
    """Repeats features [B, D] at every position of ids i64[B, T]: [B, T, D]."""

    name: ClassVar[str] = "repeat"

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, ids = inputs
        length: Dim = ids.shape[1]
        return (x.with_shape(x.shape[0], length, x.width),)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.unsqueeze(1).expand(-1, {operand(args[1])}.shape[1], -1)"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        length = Traced("getitem", (Traced("getattr", (Input(1), "shape")), 1))
        return Traced("expand", (Traced("unsqueeze", (Input(0), 1)), -1, length, -1))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        x, ids = inputs
        return torch.stack([x] * ids.shape[1], 1)
