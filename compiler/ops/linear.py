"""Matrix products: the linear layer and its two gradients. The operations after a product become its epilogue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from specc.compiler.ir.graph import Dim, Gradients, Input, Op, Sizes, Tape, TensorType, TorchCall, TypeRuleError

if TYPE_CHECKING:
    from torch import Tensor


def rows(type: TensorType) -> tuple[Dim, ...]:
    """Returns all dims but the last. Kernels flatten them to one dim of rows."""
    return type.shape[:-1]


@dataclass(frozen=True, slots=True)
class Product(Op):
    """A product of rows [..., K] with a stored weight, which a GEMM kernel can compute.

    `layout` is the layout of the weight: `nk` is [N, K] and `kn` is [K, N], both row-major.
    """

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "products"
    planned: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    layout: ClassVar[Literal["nk", "kn"]]

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        n, k = self.extent(inputs[1])
        return self.name, f"n{n}_k{k}"

    def product_text(self, rows: str, weight: str) -> str:
        """Returns the product of rows with one weight as a Python expression."""
        return f"{rows} @ {weight}.T" if self.layout == "nk" else f"{rows} @ {weight}"

    def extent(self, weight: TensorType) -> tuple[int, int]:
        """Returns N and K of the product."""
        n, k = weight.shape if self.layout == "nk" else reversed(weight.shape)
        assert isinstance(n, int) and isinstance(k, int)
        return n, k


@dataclass(frozen=True, slots=True)
class Linear(Product):
    """Computes y = x w^T for x [..., K] and one or more weights w [N, K], each with its own accumulator.

    `weights` is the number of weights. All have the same shape and multiply the same x.
    """

    name: ClassVar[str] = "linear"
    layout: ClassVar[Literal["nk", "kn"]] = "nk"
    weights: int = 1

    @property
    def arity(self) -> int:
        return 1 + self.weights

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if len(inputs) != self.arity:
            raise TypeRuleError(f"takes {self.arity} inputs but is given {len(inputs)}")
        x, *weights = inputs
        for i, weight in enumerate(weights, 1):
            if len(weight.shape) != 2:
                raise TypeRuleError(f"takes a matrix [N, K], not {weight}", (i,))
            if weight.width != x.width:
                raise TypeRuleError(f"takes {weight.width} features but {{input}} gives {x.width}", (0, i))
            if weight.shape != weights[0].shape:
                raise TypeRuleError(f"needs weights of equal shape, not {weights[0].shape} and {weight.shape}", (1, i))
        return tuple(x.with_shape(*rows(x), weight.shape[0]) for weight in weights)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, weight = inputs[0], inputs[1]
        return 2 * x.with_shape(*rows(x)).count(sizes) * weight.count(sizes) * self.weights

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("F.linear", (Input(0), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        x, *weights = inputs
        products = tuple(x @ weight.T for weight in weights)
        return products if len(products) > 1 else products[0]

    def derivative(self, tape: Tape) -> Gradients | None:
        x, weight, grad = tape.input(0), tape.input(1), tape.grad()
        return tape.add("dgrad", Dgrad(), (grad, weight)), tape.add("wgrad", Wgrad(), (grad, x))


@dataclass(frozen=True, slots=True)
class Dgrad(Product):
    """The input gradient of a linear layer: dx = dy w for dy [..., N] and the stored weight w [N, K]."""

    name: ClassVar[str] = "dgrad"
    gradient: ClassVar[bool] = True
    layout: ClassVar[Literal["nk", "kn"]] = "kn"
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, weight = inputs
        if dy.width != weight.shape[0]:
            raise TypeRuleError(f"takes {weight.shape[0]} features but {{input}} gives {dy.width}", (0, 1))
        return (dy.with_shape(*rows(dy), weight.shape[1]),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        dy, weight = inputs[0], inputs[1]
        return 2 * dy.with_shape(*rows(dy)).count(sizes) * weight.count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("@", (Input(0), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        return torch.einsum("...n,nk->...k", *inputs)


@dataclass(frozen=True, slots=True)
class Wgrad(Op):
    """The weight gradient of a linear layer: dw = dy^T x, summed over all rows of dy [..., N] and x [..., K]."""

    name: ClassVar[str] = "wgrad"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "products"
    gradient: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, x = inputs
        if rows(dy) != rows(x):
            raise TypeRuleError(f"needs inputs with equal rows, not {rows(dy)} and {rows(x)}", (0, 1))
        return (x.with_shape(dy.width, x.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * inputs[0].count(sizes) * inputs[1].with_shape(inputs[1].width).count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("@", (TorchCall(".", (Input(0), "T")), Input(1)))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        import torch

        return torch.einsum("rn,rk->nk", *(tensor.flatten(0, -2) for tensor in inputs))
