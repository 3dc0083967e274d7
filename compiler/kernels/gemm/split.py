"""Splits a node of several products: the library computes all but the last, and a kernel reads them as tiles."""

from dataclasses import dataclass, replace

from specc.compiler.expr import Var, substitute
from specc.compiler.kernels.epilogue import Epilogue, Result, Value


@dataclass(frozen=True, slots=True)
class GivenProduct:
    """x times `weight` by the library, rounded to the dtype of x. `into` is an output of the node where it is `kept`,
    else gone after the call."""

    weight: Value
    into: Value
    kept: bool

    def formula(self, epilogue: Epilogue, layout: str) -> str:
        """The formula, e.g. `p_x = x w_x^T, by the library, bf16`."""
        product = {"nk": "{x} {w}^T", "kn": "{x} {w}"}[layout].format(x=epilogue.x.name, w=self.weight.name)
        return f"{self.into.name} = {product}, by the library, {self.into.type.dtype}"

    def code(self, epilogue: Epilogue, layout: str) -> str:
        """A line of Python that computes it, where `m` is the number of rows."""
        weight = {"nk": f"{self.weight.name}.T", "kn": self.weight.name}[layout]
        product = f"torch.mm({epilogue.x.name}.view(m, K), {weight}"
        return f"{product}, out={self.into.name}.view(m, N))" if self.kept else f"{self.into.name} = {product})"


def split(epilogue: Epilogue) -> tuple[Epilogue, tuple[GivenProduct, ...]]:
    """The epilogue that is left for a kernel of one accumulator, and the products before it. The last product is the
    kernel's: a `gate` stands behind `x`, and what passes an exponential gains from an accumulator that is not rounded.

    An output that is nothing but one of the library's products is written by the library, and only read here."""
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
