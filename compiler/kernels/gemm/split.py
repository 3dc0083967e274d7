"""Splits a node with several matrix products. Library calls compute all products except the last. The kernel computes
the last product and reads the other results as tiles."""

from dataclasses import dataclass, replace

from specc.compiler.expr import Var, substitute
from specc.compiler.kernels.epilogue import Epilogue, Result, Value


@dataclass(frozen=True, slots=True)
class GivenProduct:
    """The matrix product of x and `weight`, computed by a library call and rounded to the dtype of x.

    `into` names the result: an output of the node if `is_output`, and a temporary otherwise.
    """

    weight: Value
    into: Value
    is_output: bool

    def formula(self, epilogue: Epilogue) -> str:
        """Returns the formula, e.g. `p_x = x w_x^T, by the library, bf16`."""
        return f"{self.into.name} = {epilogue.product(self.weight)}, by the library, {self.into.type.dtype}"

    def code(self, epilogue: Epilogue) -> str:
        """Returns the line of Python that computes the product. In this line, `m` is the number of rows."""
        weight = self.weight.name + (".T" if epilogue.layout == "nk" else "")
        product = f"torch.mm({epilogue.x.name}.view(m, K), {weight}"
        return f"{product}, out={self.into.name}.view(m, N))" if self.is_output else f"{self.into.name} = {product})"


def split(epilogue: Epilogue) -> tuple[Epilogue, tuple[GivenProduct, ...]]:
    """Returns the epilogue that remains, with one accumulator, and the products that library calls compute first.

    The kernel computes the last product. In a gated activation, the last product is the gate, so the activation of the
    gate is computed from an unrounded accumulator. If an output equals one of the other products, the library call
    writes the output directly.
    """
    *firsts, accumulator = epilogue.accumulators
    *weights, weight = epilogue.weights
    first, *others = epilogue.results
    dtype, whole = epilogue.x.type.dtype, first.value.type.shape
    outputs = {r.expr.name: r.value for r in others[::-1] if isinstance(r.expr, Var) and r.value.type.dtype == dtype}
    products = tuple(
        GivenProduct(w, outputs.get(p, Value(p, epilogue.x.type.with_shape(*whole))), p in outputs)
        for p, w in zip(firsts, weights, strict=True)
    )
    written = {product.into for product in products}
    renamed = {p: Var(product.into.name) for p, product in zip(firsts, products, strict=True)}
    results = (Result(r.value, substitute(r.expr, renamed)) for r in epilogue.results if r.value not in written)
    operands = (*(product.into for product in products), *epilogue.operands)
    rest = replace(epilogue, weights=(weight,), accumulators=(accumulator,), operands=operands, results=tuple(results))
    return rest, products
