"""Ops that only move data: embedding lookup, heads, slices, padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.graph import Gradients, Input, Op, Sizes, Tape, TensorType, Traced, TypeRuleError, spelled

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    """Looks up row ids[...] of a table [V, D], for ids in [0, V)."""

    name: ClassVar[str] = "embedding"

    @property
    def arity(self) -> int:
        return 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        ids, table = inputs
        return (table.with_shape(*ids.shape, table.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"F.embedding({args[0]}, {args[1]})"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("embedding", (Input(0), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        ids, table = inputs
        return table[ids]


@dataclass(frozen=True, slots=True)
class SplitHeads(Op):
    """Reshapes [..., H C] to [..., H, C] for `heads` heads of equal size."""

    name: ClassVar[str] = "split_heads"
    heads: int

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        if not isinstance(x.width, int) or x.width % self.heads:
            raise TypeRuleError(f"splits {{input}} of {x.width} features into {self.heads} equal heads", (0,))
        return (x.with_shape(*x.shape[:-1], self.heads, x.width // self.heads),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        width = inputs[0].width
        assert isinstance(width, int)
        return f"{operand(args[0])}.unflatten(-1, ({spelled(self.heads)}, {spelled(width // self.heads)}))"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        width = inputs[0].width
        assert isinstance(width, int)
        return Traced("unflatten", (Input(0), -1, (self.heads, width // self.heads)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].reshape(*inputs[0].shape[:-1], self.heads, -1)


@dataclass(frozen=True, slots=True)
class MergeHeads(Op):
    """Reshapes [..., H, C] to [..., H C]."""

    name: ClassVar[str] = "merge_heads"

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        *rest, heads, size = x.shape
        assert isinstance(heads, int) and isinstance(size, int)
        return (x.with_shape(*rest, heads * size),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.flatten(-2)"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("flatten", (Input(0), -2))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].reshape(*inputs[0].shape[:-2], -1)


@dataclass(frozen=True, slots=True)
class FirstFeatures(Op):
    """Returns the first `features` features of x [..., D]."""

    name: ClassVar[str] = "first_features"
    keeps_features: ClassVar[bool] = True
    features: int

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        if not isinstance(x.width, int) or x.width < self.features:
            raise TypeRuleError(f"reads {self.features} features but {{input}} gives {x.width}", (0,))
        return (x.with_shape(*x.shape[:-1], self.features),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}[..., :{self.features}]"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("getitem", (Input(0), (Ellipsis, slice(None, self.features))))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].narrow(-1, 0, self.features)


@dataclass(frozen=True, slots=True)
class Halves(Op):
    """Splits the features of x [..., 2 D] into two halves. `labels` are their names in generated code."""

    name: ClassVar[str] = "halves"
    inline: ClassVar[bool] = False
    labels: tuple[str, str] = ("first", "second")

    @property
    def arity(self) -> int:
        return 1

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        if not isinstance(x.width, int) or x.width % 2:
            raise TypeRuleError(f"halves {x.width} features", (0,))
        half = x.with_shape(*x.shape[:-1], x.width // 2)
        return half, half

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}.chunk(2, dim=-1)"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("chunk", (Input(0), 2), (("dim", -1),))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        half = inputs[0].shape[-1] // 2
        return inputs[0].narrow(-1, 0, half), inputs[0].narrow(-1, half, half)


@dataclass(frozen=True, slots=True)
class Last(Op):
    """Returns the last position of [B, T, D], as [B, D]."""

    name: ClassVar[str] = "last"
    keeps_features: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        return (x.with_shape(x.shape[0], *x.shape[2:]),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}[:, -1]"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("getitem", (Input(0), (slice(None), -1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].select(1, inputs[0].shape[1] - 1)


@dataclass(frozen=True, slots=True)
class PadRows(Op):
    """Pads a matrix [N, K] with rows of zeros at the end to [rows, K]."""

    name: ClassVar[str] = "pad_rows"
    listed: ClassVar[bool] = True
    rows: int

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if len(x.shape) != 2 or not isinstance(x.shape[0], int) or x.shape[0] > self.rows:
            raise TypeRuleError(f"pads a matrix of at most {self.rows} rows, not {x}", (0,))
        return (x.with_shape(self.rows, x.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"F.pad({args[0]}, (0, 0, 0, {self._missing(inputs[0])}))"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("pad", (Input(0), (0, 0, 0, self._missing(inputs[0]))))

    def _missing(self, x: TensorType) -> int:
        assert isinstance(x.shape[0], int)
        return self.rows - x.shape[0]

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        (x,) = inputs
        return torch.cat((x, x.new_zeros(self.rows - x.shape[0], x.shape[1])))

    def derivative(self, tape: Tape) -> Gradients | None:
        rows = tape.type(0).shape[0]
        assert isinstance(rows, int)
        return (tape.add("crop", CropRows(rows), (tape.grad(),)),)


@dataclass(frozen=True, slots=True)
class CropRows(Op):
    """Returns the first `rows` rows of a matrix [N, K]."""

    name: ClassVar[str] = "crop_rows"
    listed: ClassVar[bool] = True
    rows: int

    @property
    def arity(self) -> int:
        return 1

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if len(x.shape) != 2 or not isinstance(x.shape[0], int) or x.shape[0] < self.rows:
            raise TypeRuleError(f"crops a matrix of at least {self.rows} rows, not {x}", (0,))
        return (x.with_shape(self.rows, x.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{operand(args[0])}[:{self.rows}]"

    def traced(self, inputs: Sequence[TensorType]) -> Traced:
        return Traced("getitem", (Input(0), slice(None, self.rows)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        return inputs[0].narrow(0, 0, self.rows)
