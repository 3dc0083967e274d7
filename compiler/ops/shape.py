"""Ops that only move data: embedding lookup, heads, slices, padding, layout."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Gradients, Op, SupportCall, Tape
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record


class Moves(Op):
    """The base class of ops that move values without arithmetic. By default, the output has the type of the first
    input."""

    arity: ClassVar[int] = 1
    flops_per_output: ClassVar[int] = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0],)


class Embedding(Moves):
    """Looks up row ids[...] of a table [V, D], for ids in [0, V)."""

    name: ClassVar[str] = "embedding"
    always_stored: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        ids, table = inputs
        return (table.with_shape(*ids.shape, table.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("F.embedding", (Input(0), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        ids, table = inputs
        return table[ids]


@record
class SplitHeads(Moves):
    """Reshapes [..., H C] to [..., H, C] for `heads` heads of equal size."""

    name: ClassVar[str] = "split_heads"
    heads: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        if not isinstance(x.width, int) or x.width % self.heads:
            message = f"cannot split the {x.width} features of {{input}} into {self.heads} equal heads"
            raise TypeRuleError(message, (0,), f"use a number of features that is a multiple of {self.heads}")
        return (x.with_shape(*x.shape[:-1], self.heads, x.width // self.heads),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".unflatten", (Input(0), -1, self.infer(inputs)[0].shape[-2:]))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].reshape(*inputs[0].shape[:-1], self.heads, -1)


class MergeHeads(Moves):
    """Reshapes [..., H, C] to [..., H C]."""

    name: ClassVar[str] = "merge_heads"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        *rest, heads, size = x.shape
        assert isinstance(heads, int) and isinstance(size, int)
        return (x.with_shape(*rest, heads * size),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".flatten", (Input(0), -2))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].reshape(*inputs[0].shape[:-2], -1)


@record
class ExpandHeads(Moves):
    """Repeats the single head of [..., 1, C] as a view [..., H, C]."""

    name: ClassVar[str] = "expand_heads"
    heads: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        if x.shape[-2] != 1:
            raise TypeRuleError(f"needs a value with one head [..., 1, C] to repeat it, not {x}", (0,))
        return (x.with_shape(*x.shape[:-2], self.heads, x.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".expand", (Input(0), *[-1] * (len(inputs[0].shape) - 2), self.heads, -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].repeat_interleave(self.heads, -2)


@record
class FirstFeatures(Moves):
    """Returns the first `features` features of x [..., D]."""

    name: ClassVar[str] = "first_features"
    keeps_features: ClassVar[bool] = True
    features: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        if not isinstance(x.width, int) or x.width < self.features:
            raise TypeRuleError(f"reads {self.features} features but {{input}} gives {x.width}", (0,))
        return (x.with_shape(*x.shape[:-1], self.features),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("[]", (Input(0), (..., slice(None, int(self.features)))))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].narrow(-1, 0, self.features)


class CropColumns(FirstFeatures):
    """Removes padding: returns the first `features` columns of [..., N]."""

    name: ClassVar[str] = "crop_columns"
    listed: ClassVar[bool] = True


@record
class Split(Moves):
    """Splits the features of x [..., n D] into n equal parts [..., D]. `labels` are the names of the parts in
    generated code."""

    name: ClassVar[str] = "split"
    inline: ClassVar[bool] = False
    labels: tuple[str, ...] = ("first", "second")

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, parts = inputs[0], len(self.labels)
        if not isinstance(x.width, int) or x.width % parts:
            message = f"cannot split the {x.width} features of {{input}} into {parts} equal parts"
            raise TypeRuleError(message, (0,), f"use a number of features that is a multiple of {parts}")
        return (x.with_shape(*x.shape[:-1], x.width // parts),) * parts

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".chunk", (Input(0), len(self.labels)), (("dim", -1),))

    def reference(self, *inputs: Tensor) -> Tensors:
        width = inputs[0].shape[-1] // len(self.labels)
        return tuple(inputs[0].narrow(-1, i * width, width) for i in range(len(self.labels)))


@record
class SplitFeatures(Moves):
    """Splits the features of x [..., D] into consecutive parts of `sizes` features, as views of x. `labels` are the
    names of the parts in generated code."""

    name: ClassVar[str] = "split_features"
    inline: ClassVar[bool] = False
    views: ClassVar[bool] = True
    sizes: tuple[int, ...]
    labels: tuple[str, ...]

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if x.width != sum(self.sizes) or len(self.sizes) != len(self.labels):
            raise TypeRuleError(f"cannot split the {x.width} features of {{input}} into {list(self.sizes)}", (0,))
        return tuple(x.with_shape(*x.shape[:-1], size) for size in self.sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".split", (Input(0), self.sizes, -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        (x,) = inputs
        return tuple(x.narrow(-1, sum(self.sizes[:i]), size) for i, size in enumerate(self.sizes))

    def derivative(self, tape: Tape) -> Gradients | None:
        return (tape.add("joined", JoinFeatures(len(self.sizes)), [tape.grad(i) for i in range(len(self.sizes))]),)


@record
class Concatenation(Op):
    """Concatenates `count` inputs along one dim."""

    flops_per_output: ClassVar[int] = 0
    count: int

    @property
    def arity(self) -> int:
        return self.count


class JoinFeatures(Concatenation):
    """Concatenates `count` values [..., D] along their features."""

    name: ClassVar[str] = "join_features"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        first = inputs[0]
        if any(x.shape[:-1] != first.shape[:-1] or x.dtype != first.dtype for x in inputs):
            raise TypeRuleError(
                "joins values of one dtype whose shapes are equal except in the last dim, "
                f"not {', '.join(map(str, inputs))}"
            )
        return (first.with_shape(*first.shape[:-1], sum(x.width for x in inputs if isinstance(x.width, int))),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("torch.cat", (tuple(map(Input, range(self.count))), -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.cat(inputs, -1)


class PartHeads(SplitHeads):
    """Reshapes a part [..., H C] of a wider tensor to a view [..., H, C]."""

    name: ClassVar[str] = "part_heads"
    views: ClassVar[bool] = True

    def derivative(self, tape: Tape) -> Gradients | None:
        return (tape.add("merged", MergeHeads(), (tape.grad(),)),)


@record
class NewFeatures(Moves):
    """Returns an uninitialized tensor [..., `width`]. The input [..., H, C] gives the leading dims and the dtype."""

    name: ClassVar[str] = "new_features"
    assigned: ClassVar[bool] = True
    width: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        return (x.with_shape(*x.shape[:-2], self.width),)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 0

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        return f"{args[0]}.new_empty(*{args[0]}.shape[:-2], {self.width})"

    def reference(self, *inputs: Tensor) -> Tensors:
        (x,) = inputs
        return x.new_zeros(*x.shape[:-2], self.width)


@record
class WriteFeatures(SupportCall, Moves):
    """Writes a part [..., N] or [..., H, C] in place to consecutive features of x [..., D], and returns x. The index of
    the first of these features is `at`."""

    name: ClassVar[str] = "write_features"
    assigned: ClassVar[bool] = True
    written: ClassVar[int | None] = 0
    arity: ClassVar[int] = 2
    at: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, part = inputs
        count = 1
        for dim in part.shape[len(x.shape) - 1 :]:
            assert isinstance(dim, int)
            count *= dim
        assert isinstance(x.width, int)
        if part.shape[: len(x.shape) - 1] != x.shape[:-1] or part.dtype != x.dtype or self.at + count > x.width:
            raise TypeRuleError(
                f"cannot write {part} to the features of {x} from {self.at} on: the types do not match", (0, 1)
            )
        return (x,)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * inputs[1].bytes(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        x, part = inputs
        part = part.reshape(*x.shape[:-1], -1)
        written = x.clone()
        written[..., self.at : self.at + part.shape[-1]] = part
        return written


@record
class Part(Moves):
    """Divides the features of [..., parts D] into `parts` equal parts, and returns part `index`: [..., D]."""

    name: ClassVar[str] = "part"
    index: int
    parts: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if not isinstance(x.width, int) or x.width % self.parts or not 0 <= self.index < self.parts:
            raise TypeRuleError(f"cannot take part {self.index} of {self.parts} equal parts of {x}", (0,))
        return (x.with_shape(*x.shape[:-1], x.width // self.parts),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("[]", (TorchCall(".chunk", (Input(0), self.parts, -1)), self.index))

    def reference(self, *inputs: Tensor) -> Tensors:
        width = inputs[0].shape[-1] // self.parts
        return inputs[0].narrow(-1, self.index * width, width)


class Last(Moves):
    """Returns the last position of [B, T, D], as [B, D]."""

    name: ClassVar[str] = "last"
    keeps_features: ClassVar[bool] = True

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = inputs[0]
        return (x.with_shape(x.shape[0], *x.shape[2:]),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("[]", (Input(0), (slice(None), -1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].select(1, inputs[0].shape[1] - 1)


@record
class PadRows(Moves):
    """Pads a matrix [N, K] with rows of zeros at the end to [rows, K]."""

    name: ClassVar[str] = "pad_rows"
    listed: ClassVar[bool] = True
    rows: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if len(x.shape) != 2 or not isinstance(x.shape[0], int) or x.shape[0] > self.rows:
            raise TypeRuleError(f"pads a matrix of at most {self.rows} rows, not {x}", (0,))
        return (x.with_shape(self.rows, x.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        rows = inputs[0].shape[0]
        assert isinstance(rows, int)
        return TorchCall("F.pad", (Input(0), (0, 0, 0, self.rows - rows)))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        (x,) = inputs
        return torch.cat((x, x.new_zeros(self.rows - x.shape[0], x.shape[1])))

    def derivative(self, tape: Tape) -> Gradients | None:
        rows = tape.type(0).shape[0]
        assert isinstance(rows, int)
        return (tape.add("crop", CropRows(rows), (tape.grad(),)),)


@record
class CropRows(Moves):
    """Returns the first `rows` rows of a matrix [N, K]."""

    name: ClassVar[str] = "crop_rows"
    listed: ClassVar[bool] = True
    rows: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if len(x.shape) != 2 or not isinstance(x.shape[0], int) or x.shape[0] < self.rows:
            raise TypeRuleError(f"crops a matrix of at least {self.rows} rows, not {x}", (0,))
        return (x.with_shape(self.rows, x.width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("[]", (Input(0), slice(None, int(self.rows))))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].narrow(0, 0, self.rows)


class ConcatRows(Concatenation):
    """Concatenates `count` matrices [N, K] of equal K along their rows."""

    name: ClassVar[str] = "concat_rows"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if any(len(x.shape) != 2 or x.width != inputs[0].width or x.dtype != inputs[0].dtype for x in inputs):
            matrices = ", ".join(map(str, inputs))
            raise TypeRuleError(f"concatenates matrices of one dtype with equal numbers of columns, not {matrices}")
        rows = sum(x.shape[0] for x in inputs if isinstance(x.shape[0], int))
        return (TensorType((rows, inputs[0].width), inputs[0].dtype),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("torch.cat", (tuple(map(Input, range(self.count))),))

    def reference(self, *inputs: Tensor) -> Tensors:
        joined = inputs[0].new_empty(sum(x.shape[0] for x in inputs), inputs[0].shape[1])
        for i, x in enumerate(inputs):
            start = sum(other.shape[0] for other in inputs[:i])
            joined[start : start + x.shape[0]] = x
        return joined


class Column(Moves):
    """Returns a vector [N] as a column [N, 1]."""

    name: ClassVar[str] = "column"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = inputs
        if len(x.shape) != 1:
            raise TypeRuleError(f"takes a vector, not {x}", (0,))
        return (TensorType((*x.shape, 1), x.dtype),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".unsqueeze", (Input(0), 1))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].reshape(-1, 1)


class RowByRow(Moves):
    """Returns the input in contiguous row-major order. Copies the input only if the input is not contiguous."""

    name: ClassVar[str] = "row_by_row"
    keeps_features: ClassVar[bool] = True

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".contiguous", (Input(0),))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0]


@record
class TimeMajor(Moves):
    """Transposes [B, T, D] to a contiguous [T, B, D]. With `backward`, the result is also reversed in time. With
    `back`, the input is [T, B, D], and the output is a view [B, T, D].
    """

    name: ClassVar[str] = "time_major"
    keeps_features: ClassVar[bool] = True
    backward: bool = False
    back: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        a, b, width = inputs[0].shape
        return (inputs[0].with_shape(b, a, width),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        x = TorchCall(".flip", (Input(0), 1)) if self.backward else Input(0)
        swapped = TorchCall(".transpose", (x, 0, 1))
        return swapped if self.back else TorchCall(".contiguous", (swapped,))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        steps = range(inputs[0].shape[1])
        return torch.stack([inputs[0][:, t] for t in (reversed(steps) if self.backward else steps)])
