"""Splits a node with several matrix products into library calls and one kernel. Library calls compute all products
except the last. The kernel computes the last product, and reads the results of the library calls as tiles."""

from dataclasses import replace
from typing import NamedTuple

from specc.compiler.expr import Var, substitute
from specc.compiler.kernels.epilogue import Epilogue, Result, Value


class GivenProduct(NamedTuple):
    """A matrix product of x and `weight` that a library call computes. The product is rounded to the dtype of x.

    `into` names the result. The result is an output of the node if `is_output`, otherwise a temporary tensor.
    """

    weight: Value
    into: Value
    is_output: bool

    def formula(self, epilogue: Epilogue) -> str:
        """Returns the formula, such as `p_x = x w_x^T, by the library, bf16`."""
        return f"{self.into.name} = {epilogue.product(self.weight)}, by the library, {self.into.type.dtype}"

    def code(self, epilogue: Epilogue) -> str:
        weight = self.weight.name + (".T" if epilogue.layout == "nk" else "")
        product = f"torch.mm({epilogue.x.name}.view(m, K), {weight}"
        return f"{product}, out={self.into.name}.view(m, N))" if self.is_output else f"{self.into.name} = {product})"


def split(epilogue: Epilogue) -> tuple[Epilogue, tuple[GivenProduct, ...]]:
    """Returns an epilogue with only the last product, and the other products, which library calls compute first.

    The last product of a gated activation is the gate, so the activation reads the gate without rounding. If an output
    equals one of the other products, the library call writes this output directly.
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
