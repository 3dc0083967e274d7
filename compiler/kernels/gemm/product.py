"""The Python function for a matrix product and its epilogue. The function has the same signature for kernels in all
languages."""

from collections.abc import Iterable

from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.epilogue import Epilogue, Value
from specc.compiler.kernels.generated import GeneratedFunction, generated_function
from specc.compiler.kernels.kernel import Site
from specc.compiler.records import record


@record
class Product:
    """The fields that the templates of a matrix product share in all languages.

    Attributes:
        x: The name of the input of the product. This input determines the number of rows and the device.
        wanted: The input checks of the generated function.
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
    """Returns the description of the generated function. The function maps x [..., K], weights and operands to outputs
    [..., N].

    Args:
        site: The product.
        epilogue: The inputs and outputs of the product.
        words: A description of the products and the epilogue, for the summary of the function. By default, `product and
            epilogue`, with the numbers of products and outputs if there are several.
        formulas: The formulas of the computed values. By default, the formulas of `epilogue`.

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
    if value is epilogue.x:
        return rows, k
    if value in epilogue.weights:
        return (n, k) if epilogue.layout == "nk" else (k, n)
    if value.buffer:
        return tuple(map(str, value.type.shape))
    return (n,) if value.column else (rows, n)
