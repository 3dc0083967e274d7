"""Linear layers with few input rows, such as the tokens of a decoding step, after an optional RMS norm."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.decoding.packed_codes import dequantized, lanes_of
from specc.compiler.ops.linear import Linear, rows
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.records import record


@record
class RowLinear(Op):
    """Computes h w^T for one or more weights w [N, K]. h is the input x [..., K], or the RMS norm of x. The inputs are
    x, the weight [K] of the norm if `affine`, and the weights w. N may differ between weights, unless the node has an
    epilogue. A packed weight is two inputs: its codes u8 [N, bits * lanes] and its scales f16 [N].

    Attributes:
        weights: The number of weights.
        eps: The epsilon of the RMS norm. None if there is no norm.
        affine: Whether the norm has a weight.
        labels: The names of the outputs in generated code. Empty if there is one output.
        packed: Whether weights are integer codes with a scale per row, in the layout of packed_codes.py.
    """

    name: ClassVar[str] = "row_linear"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "products"
    planned: ClassVar[bool] = True
    everywhere: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    weights: int = 1
    eps: float | None = None
    affine: bool = False
    labels: tuple[str, ...] = ()
    packed: bool = False

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    @property
    def norm(self) -> RmsNorm | None:
        return None if self.eps is None else RmsNorm(self.eps, self.affine)

    @property
    def first(self) -> int:
        """The index of the first weight among the inputs."""
        return self.norm.arity if self.norm is not None else 1

    @property
    def arity(self) -> int:
        return self.first + self.weights * (1 + self.packed)

    @property
    def words(self) -> str:
        weights = " with packed weights" * self.packed
        norm = "" if self.norm is None else f" after a norm{self.norm.settings()}"
        return f"linear of few rows{weights}{norm}"

    def each_weight(self, inputs: Sequence[TensorType]) -> Sequence[TensorType]:
        """Returns the type of each weight. For packed weights, these are the types of the codes."""
        return inputs[self.first : self.arity : 1 + self.packed]

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        widths = "_".join(str(weight.shape[0]) for weight in self.each_weight(inputs))
        word = f"{'norm_' * (self.norm is not None)}{'packed_' * self.packed}row_linear"
        return word, f"n{widths}_k{inputs[0].width}"

    def site_type(self, type: TensorType) -> TensorType:
        # One kernel reads codes with any number of bits, because layers may have different numbers of bits.
        return type.with_shape(type.shape[0], "W") if type.dtype == "u8" else super().site_type(type)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = self.norm.infer(inputs[: self.first])[0] if self.norm is not None else inputs[0]
        weights = inputs[self.first : self.arity]
        if self.packed:
            pairs = zip(weights[::2], weights[1::2], strict=True)
            weights = [_weight(x, codes, scale, self.first + 2 * i) for i, (codes, scale) in enumerate(pairs)]
        return tuple(Linear().infer((x, weight))[0] for weight in weights)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        each = inputs[0].with_shape(*rows(inputs[0])).count(sizes)
        return 2 * each * int(inputs[0].width) * sum(int(weight.shape[0]) for weight in self.each_weight(inputs))

    def reference(self, *inputs: Tensor) -> Tensors:
        x = inputs[0]
        if self.norm is not None:
            normed = self.norm.reference(*inputs[: self.first])
            x = normed[0] if isinstance(normed, tuple) else normed
        weights = inputs[self.first : self.arity]
        if self.packed:
            pairs = zip(weights[::2], weights[1::2], strict=True)
            weights = tuple(dequantized(codes, scale.to(x), x.shape[-1]).to(x) for codes, scale in pairs)
        products = tuple(x @ weight.T for weight in weights)
        return products if len(products) > 1 else products[0]


def _weight(x: TensorType, codes: TensorType, scale: TensorType, at: int) -> TensorType:
    lanes, width = lanes_of(int(x.width)), codes.width
    if codes.dtype != "u8" or len(codes.shape) != 2 or (isinstance(width, int) and width % lanes):
        raise TypeRuleError(f"takes codes u8 [N, bits * {lanes}] for {x.width} features, not {codes}", (at,))
    if isinstance(width, int) and not 2 <= width // lanes <= 8:
        raise TypeRuleError(f"takes codes of 2 to 8 bits, not of {width // lanes}", (at,))
    if (scale.shape, scale.dtype) != (codes.shape[:1], "f16"):
        raise TypeRuleError(f"takes one f16 scale per row of {codes}, not {scale}", (at, at + 1))
    return TensorType((codes.shape[0], x.width), x.dtype)
