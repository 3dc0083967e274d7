"""The Python function that generated code calls for a matrix product and its epilogue. Its signature is the same for
kernels in all languages."""

from collections.abc import Iterable
from dataclasses import dataclass

from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.epilogue import Epilogue, Value
from specc.compiler.kernels.generated import GeneratedFunction, generated_function
from specc.compiler.kernels.kernel import Site


@dataclass(frozen=True, slots=True)
class Product:
    """The fields that the templates of a matrix product need in every language.

    Attributes:
        x: The input of the product. The other inputs must have the same number of rows and the same device.
        wanted: Rows for the table of input checks.
        allocated: Lines that allocate the outputs.
        result: The returned expression.
        changed: The names of the inputs that the kernel changes, as a tuple.
    """

    n: int
    k: int
    x: str
    wanted: tuple[str, ...]
    allocated: tuple[str, ...]
    result: str
    changed: str


def product_of(epilogue: Epilogue) -> Product:
    x = epilogue.x
    wanted, allocated = [], []
    for value in epilogue.inputs:
        dims = _dims(value, epilogue, "*rows", "N", "K")
        shape = ", ".join(dims) + ("," if len(dims) == 1 else "")
        wanted.append(f'("{value.name}", {value.name}, ({shape}), {DTYPES[value.type.dtype]}),')
    for value in epilogue.outputs:
        dtype = "" if value.type.dtype == x.type.dtype else f", dtype={DTYPES[value.type.dtype]}"
        allocated.append(f"{value.name} = {x.name}.new_empty(*rows, N{dtype})")
    result = ", ".join(value.name for value in epilogue.outputs)
    return Product(epilogue.n, epilogue.k, x.name, tuple(wanted), tuple(allocated), result, repr(epilogue.changed))


def product_function(
    site: Site, epilogue: Epilogue, words: str = "", formulas: Iterable[str] = ()
) -> GeneratedFunction:
    """Returns the description of the generated function. It maps x [..., K], weights and operands to outputs [..., N].

    Args:
        site: The product.
        epilogue: The inputs and outputs of the product.
        words: A description of the products and the epilogue. The default states that a single kernel computes both.
        formulas: The formulas; by default, those of `epilogue`.

    Returns:
        The description.
    """
    n, k = str(epilogue.n), str(epilogue.k)
    inputs, outputs = ({value.name: value.type for value in values} for values in (epilogue.inputs, epilogue.outputs))
    shapes = {value.name: f"[{', '.join(_dims(value, epilogue, '...', n, k))}]" for value in epilogue.inputs}
    shapes |= dict.fromkeys(outputs, f"[..., {n}]")
    if not words:
        words = "product" if len(epilogue.weights) == 1 else f"{len(epilogue.weights)} products of one input"
        words += " and epilogue" if len(outputs) == 1 else f" and epilogue of {len(outputs)} outputs"
    summary = f"{site.label}: {words} in one kernel."
    return generated_function(site, inputs, outputs, shapes, summary, formulas or epilogue.formulas)


def _dims(value: Value, epilogue: Epilogue, rows: str, n: str, k: str) -> tuple[str, ...]:
    """Returns the dims of an input as text, with `rows`, `n` and `k` for the dims rows, N and K."""
    if value is epilogue.x:
        return rows, k
    if value in epilogue.weights:
        return (n, k) if epilogue.layout == "nk" else (k, n)
    if value.buffer:
        return tuple(map(str, value.type.shape))
    return (n,) if value.column else (rows, n)
