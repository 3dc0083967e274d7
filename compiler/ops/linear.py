"""Matrix products: the linear layer and its two gradients. The operations after a product become the product's
epilogue."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from specc.compiler.ir.op import Gradients, Op, SupportCall, Tape
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Dim, Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record


def rows(type: TensorType) -> tuple[Dim, ...]:
    """Returns all dims except the last. Kernels flatten these dims to one dim, the rows."""
    return type.shape[:-1]


class MatrixProduct(Op):
    """A product of rows [..., K] and one or more weights."""

    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "products"

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, *weights = inputs[: self.arity]
        return 2 * x.with_shape(*rows(x)).count(sizes) * sum(weight.count(sizes) for weight in weights)


class Product(MatrixProduct):
    """A matrix product of rows [..., K] and a stored weight, for a GEMM kernel.

    `layout` is the layout of the weight: `nk` is [N, K] and `kn` is [K, N], both row-major.
    """

    planned: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    layout: ClassVar[Literal["nk", "kn"]]

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        n, k = self.extent(inputs[1])
        return self.name, f"n{n}_k{k}"

    def product_text(self, rows: str, weight: str) -> str:
        """Returns the product of `rows` with one weight, as a Python expression."""
        return f"{rows} @ {weight}.T" if self.layout == "nk" else f"{rows} @ {weight}"

    def extent(self, weight: TensorType) -> tuple[int, int]:
        """Returns the extents N and K of the product."""
        n, k = weight.shape if self.layout == "nk" else reversed(weight.shape)
        assert isinstance(n, int) and isinstance(k, int)
        return n, k


@record
class Linear(Product):
    """Computes y = x w^T for x [..., K] and `weights` weights w [N, K] of equal shape. Each product has its own
    accumulator."""

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

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("F.linear", (Input(0), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, *weights = inputs
        products = tuple(x @ weight.T for weight in weights)
        return products if len(products) > 1 else products[0]

    def derivative(self, tape: Tape) -> Gradients | None:
        x, weight, grad = tape.input(0), tape.input(1), tape.grad()
        return tape.add("dgrad", Dgrad(), (grad, weight)), tape.add("wgrad", Wgrad(), (grad, x))


@record
class WideLinear(SupportCall, MatrixProduct):
    """Computes y = x w^T in f32, for x bf16[..., K] and w f32[N, K].

    w is split into a sum of three bf16 matrices. Tensor cores multiply x with all three matrices in one product, so x
    is never stored in f32. The product of two bf16 numbers is exact in f32.
    """

    name: ClassVar[str] = "wide_linear"
    rowwise: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, weight = inputs
        if (x.dtype, weight.dtype) != ("bf16", "f32"):
            raise TypeRuleError(f"multiplies bf16 values with f32 weights, not {x} with {weight}", (0, 1))
        return tuple(replace(type, dtype="f32") for type in Linear().infer(inputs))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, weight = inputs
        return x.to(weight.dtype) @ weight.T


@record
class HeadLinear(MatrixProduct):
    """Multiplies each of H heads by its own matrix [N, K]. The weight w [H N, K] consists of the H matrices, stacked
    along the rows.

    The input [..., H, N] becomes [..., H, K]. With `transposed`, [..., H, K] becomes [..., H, N].
    """

    name: ClassVar[str] = "head_linear"
    arity: ClassVar[int] = 2
    transposed: bool = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, weight = inputs
        heads, (rows, columns) = x.shape[-2], weight.shape
        assert isinstance(heads, int) and isinstance(rows, int)
        each = rows // heads
        if rows % heads or x.width != (columns if self.transposed else each):
            raise TypeRuleError(f"cannot multiply the heads of {x} by {weight}: the shapes do not match", (0, 1))
        return (x.with_shape(*x.shape[:-1], each if self.transposed else columns),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        x, weight = inputs
        return 2 * x.with_shape(*x.shape[:-2]).count(sizes) * weight.count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        formula = "...hk,hnk->...hn" if self.transposed else "...hn,hnk->...hk"
        heads = inputs[0].shape[-2]
        assert isinstance(heads, int)
        return TorchCall("torch.einsum", (formula, Input(0), TorchCall(".unflatten", (Input(1), 0, (heads, -1)))))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, weight = inputs
        each = weight.reshape(x.shape[-2], -1, weight.shape[1])
        products = x[..., None, :] * each if self.transposed else x[..., :, None] * each
        return products.sum(-1 if self.transposed else -2)


@record
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

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("@", (Input(0), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.einsum("...n,nk->...k", *inputs)


class Wgrad(MatrixProduct):
    """The weight gradient of a linear layer: dw = dy^T x, summed over all rows of dy [..., N] and x [..., K]."""

    name: ClassVar[str] = "wgrad"
    gradient: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, x = inputs
        if rows(dy) != rows(x):
            raise TypeRuleError(f"needs inputs with equal numbers of rows, not {rows(dy)} and {rows(x)}", (0, 1))
        return (x.with_shape(dy.width, x.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * inputs[0].count(sizes) * inputs[1].with_shape(inputs[1].width).count(sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("@", (TorchCall(".", (Input(0), "T")), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.einsum("rn,rk->nk", *(tensor.flatten(0, -2) for tensor in inputs))
