"""The pointwise op: expressions of the pointwise language over values that broadcast together."""

from collections.abc import Sequence
from dataclasses import field
from itertools import zip_longest
from typing import ClassVar

from specc.compiler.expr import Var, reread, torch_text, torch_value, variables
from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.op import ADDED, Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Dim, Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.dropout import mask
from specc.compiler.ops.fp8 import SCALES
from specc.compiler.records import record

CASTS = {"f32": "float", "bf16": "bfloat16", "f16": "half"}  # the tensor methods that convert to each dtype


def pointwise(b: Builder, name: str, text: str, /, dtype: str = "", title: str = "", **values: str) -> str:
    """Adds a node that computes an expression of named values.

    Args:
        b: The builder of the graph.
        name: The name of the node.
        text: The expression.
        dtype: The dtype of the result. By default, the dtype of the first value.
        title: The word for the expression in kernel names. By default, the names of the functions in the expression.
        values: The references of the values, by their names in the expression.

    Returns:
        A reference to the result.
    """
    return b.add(name, Pointwise((text,), tuple(values), dtype=dtype, title=title), tuple(values.values()))


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Returns the common shape of `shapes`. Shapes are aligned at the last dim. Missing dims and dims of 1 are
    expanded.

    Raises TypeRuleError if the shapes do not broadcast.
    """
    result: list[Dim] = []
    for column in zip_longest(*map(reversed, shapes), fillvalue=1):
        dims = {*column} - {1}
        if len(dims) > 1:
            written = [f"[{', '.join(map(str, shape))}]" for shape in shapes]
            message = f"cannot combine the shapes {', '.join(written[:-1])} and {written[-1]}"
            raise TypeRuleError(message, (0, 1))
        result.append(next(iter(dims), 1))
    return tuple(reversed(result))


@record
class Pointwise(Op):
    """Evaluates expressions element by element.

    Attributes:
        outputs: one expression per output.
        variables: the names of the inputs in the expressions, in order.
        labels: the names of the outputs in generated code. Empty for a single unnamed output.
        dtype: the dtype of the outputs. Inputs are converted to this dtype. If empty, the dtype of the first input.
        title: the word for the expression in kernel names, if the spec states one.
        draws: the variables that are dropout masks, and the probability that an element is 0. The input of such a
            variable is a buffer of type DRAW. The buffer determines the mask. Only epilogues have masks.
        scales: the variables that are products of two scales. The input of such a variable is the state of 8-bit
            products. An entry has the variable and the columns of both scales. Only epilogues have scales.
        codes: the outputs that are rounded to 8 bits. An entry has the index of the output, the variable of the state,
            the column of the scale, and the dtype to which the value is rounded first. The kernel writes the largest
            magnitude to the state. Only epilogues have codes.
    """

    name: ClassVar[str] = "pointwise"
    keeps_features: ClassVar[bool] = True
    outputs: tuple[str, ...]
    variables: tuple[str, ...]
    labels: tuple[str, ...] = ()
    dtype: str = ""
    title: str = ""
    draws: tuple[tuple[str, float], ...] = field(default=(), metadata=ADDED)
    scales: tuple[tuple[str, int, int], ...] = field(default=(), metadata=ADDED)
    codes: tuple[tuple[int, str, int, str], ...] = field(default=(), metadata=ADDED)

    @property
    def arity(self) -> int:
        return len(self.variables)

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    @property
    def formula(self) -> str:
        """Returns the expressions as text, such as `(d, slope) -> d * slope`."""
        labels = self.labels or ("",) * len(self.outputs)
        values = (f"{label} = {text}" if label else text for label, text in zip(labels, self.outputs, strict=True))
        text = f"({', '.join(self.variables)}) -> {', '.join(values)}" + (f" as {self.dtype}" if self.dtype else "")
        text += "".join(f", {name} is 0 with probability {p}" for name, p in self.draws)
        text += "".join(f", {name} is scale {i} times scale {j}" for name, i, j in self.scales)
        return text + "".join(f", output {i} from {type} by scale {j} of {name}" for i, name, j, type in self.codes)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs) != len(self.variables):
            raise TypeRuleError(f"has {len(self.variables)} operands but is given {len(inputs)} inputs")
        known = set(self.variables)
        for text in self.outputs:
            if unknown := [name for name in variables(reread(text)) if name not in known]:
                raise TypeRuleError(f"reads {unknown[0]!r}, which is not one of its operands {sorted(known)}")
        shape = broadcast([type.shape for type in inputs])
        return tuple(TensorType(shape, self.dtype or inputs[0].dtype) for _ in self.outputs)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return sum(output.count(sizes) for output in outputs)

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        names = dict(zip(self.variables, args, strict=True))
        if self.dtype and any(type.dtype != self.dtype for type in inputs):
            names = {
                name: f"{operand(text)}.{CASTS[self.dtype]}()" if type.dtype != self.dtype else text
                for (name, text), type in zip(names.items(), inputs, strict=True)
            }
        read = map(reread, self.outputs)
        texts = [names[expr.name] if isinstance(expr, Var) else torch_text(expr, names) for expr in read]
        return texts[0] if len(texts) == 1 else ", ".join(texts)

    def reference(self, *inputs: Tensor) -> Tensors:
        values = self.values(inputs)
        results = tuple(torch_value(reread(output), values) for output in self.outputs)
        return results if len(results) > 1 else results[0]

    def values(self, inputs: Sequence[Tensor]) -> dict[str, Tensor | float]:
        """Returns the value of each variable. For a variable of `draws`, the value is the dropout mask in the shape of
        the first input."""
        values: dict[str, Tensor | float] = dict(zip(self.variables, inputs, strict=True))
        first = inputs[0]
        given = dict(zip(self.variables, inputs, strict=True))
        values |= {name: given[name][SCALES, i] * given[name][SCALES, j] for name, i, j in self.scales}
        return values | {name: mask(first.shape, given[name], p).to(first) for name, p in self.draws}


@record
class SumTo(Op):
    """The gradient of broadcasting a value of `shape`. Sums x over the broadcast dims."""

    name: ClassVar[str] = "sum_to"
    arity: ClassVar[int] = 1
    shape: tuple[Dim, ...]

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if broadcast([inputs[0].shape, self.shape]) != inputs[0].shape:
            raise TypeRuleError(f"cannot sum {inputs[0]} to {list(self.shape)}", (0,))
        return (inputs[0].with_shape(*self.shape),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return inputs[0].count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".sum_to_size", (Input(0), *self.shape))

    def reference(self, *inputs: Tensor) -> Tensors:
        x = inputs[0]
        missing = x.dim() - len(self.shape)
        x = x.sum(tuple(range(missing))) if missing else x
        stretched = tuple(i for i, dim in enumerate(self.shape) if dim == 1 and x.shape[i] != 1)
        return x.sum(stretched, keepdim=True) if stretched else x
