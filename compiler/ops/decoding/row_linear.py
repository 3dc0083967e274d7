"""Linear layers of few rows, such as the tokens of a decoding step, after an optional RMS norm of their input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType
from specc.compiler.ops.linear import Linear, rows
from specc.compiler.ops.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class RowLinear(Op):
    """Computes h w^T for each of several weights w [N, K], where h [..., K] is the input or its RMS norm.

    The inputs are x [..., K], the weight [K] of the norm if it has one, and the weights. Weights may differ in N unless
    the node has an epilogue.

    Attributes:
        weights: the number of weights.
        eps: the addend of the RMS norm of the input; None for no norm.
        affine: whether the norm has a weight.
        labels: the names of the outputs in generated code; empty if there is one.
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

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    @property
    def norm(self) -> RmsNorm | None:
        """The norm of the input; None for no norm."""
        return None if self.eps is None else RmsNorm(self.eps, self.affine)

    @property
    def first(self) -> int:
        """The index of the first weight among the inputs."""
        return self.norm.arity if self.norm is not None else 1

    @property
    def arity(self) -> int:
        return self.first + self.weights

    @property
    def words(self) -> str:
        return "linear of few rows" if self.norm is None else f"linear of few rows after a norm{self.norm.settings()}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        widths = "_".join(str(weight.shape[0]) for weight in inputs[self.first : self.arity])
        return f"{'norm_' * (self.norm is not None)}row_linear", f"n{widths}_k{inputs[0].width}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x = self.norm.infer(inputs[: self.first])[0] if self.norm is not None else inputs[0]
        return tuple(Linear().infer((x, weight))[0] for weight in inputs[self.first : self.arity])

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        each = inputs[0].with_shape(*rows(inputs[0])).count(sizes)
        return 2 * each * sum(weight.count(sizes) for weight in inputs[self.first : self.arity])

    def reference(self, *inputs: Tensor) -> Tensors:
        x = inputs[0]
        if self.norm is not None:
            normed = self.norm.reference(*inputs[: self.first])
            x = normed[0] if isinstance(normed, tuple) else normed
        products = tuple(x @ weight.T for weight in inputs[self.first : self.arity])
        return products if len(products) > 1 else products[0]
