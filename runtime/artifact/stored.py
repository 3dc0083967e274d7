"""Whether the arrays of an int8 product fit it, by what their file says of them: nothing is computed before."""

from collections.abc import Mapping, Sequence

from specc.compiler.int8.products import Source
from specc.runtime.artifact.layout import Layout
from specc.runtime.artifact.table import AGAIN, ROWS, Entry, require_layout, unpacked
from specc.runtime.errors import IntegrityError

Table = Mapping[tuple[str, str], Entry]


def require_products(
    sources: Sequence[Source], shapes: Mapping[str, tuple[int, ...]], layout: Layout, text: bytes
) -> None:
    """Raises IntegrityError, naming node, expected and got, unless a file's table of arrays is there and fits every
    product, and then every array of `layout`; `shapes` are those of the weights [N, K] by name."""
    if not text:
        raise IntegrityError("it does not say what the arrays of its int8 products are", AGAIN)
    table = unpacked(text)
    for source in sources:
        n, k = shapes[source.weight]
        require_product(source, table, (n, k))
    require_layout(table, layout)


def require_product(source: Source, table: Table, extent: tuple[int, int]) -> None:
    """Raises IntegrityError, naming node, expected and got, unless the arrays of one product [N, K] fit it."""
    node, (n, k) = source.node, extent
    codes, scale, shared = (
        _entry(source, source.weight, suffix, table) for suffix in ("codes", "scale", "input_scale")
    )
    if codes.dtype != "i8":
        raise IntegrityError(f"{node}: the weight is stored as {codes.dtype}, and its product reads i8", AGAIN)
    if codes.shape != (n, k):
        transposed = ": it is stored transposed" if codes.shape == (k, n) else ""
        if len(codes.shape) != 2 or codes.shape[1] != k:
            wide = codes.shape[1] if len(codes.shape) == 2 else list(codes.shape)
            message = f"{node}: K is {wide} in the weight but its input has {k} features ({source.maker}){transposed}"
            raise IntegrityError(message, AGAIN)
        raise IntegrityError(f"{node}: N is {codes.shape[0]} in the weight, and the model has {n}", AGAIN)
    if codes.order != ROWS:
        raise IntegrityError(f"{node}: the weight [{n}, {k}] is stored by {codes.order}, and read by {ROWS}", AGAIN)
    if scale.shape != (n,):
        raise IntegrityError(f"{node}: N is {n} in the weight, and its scales are {list(scale.shape)}", AGAIN)
    if shared.shape not in ((1,), (k,)):
        message = f"{node}: its input has {k} features ({source.maker}), and the scales of it are {list(shared.shape)}"
        raise IntegrityError(message, AGAIN)
    if not source.bias:
        return
    bias, steps = (_entry(source, source.bias, suffix, table) for suffix in ("codes", "scale"))
    if bias.dtype != "i32":
        raise IntegrityError(f"{node}: the bias is stored as {bias.dtype}, and its sums are i32", AGAIN)
    if bias.shape != (n,):
        found = f"{bias.shape[0]} numbers" if len(bias.shape) == 1 else f"the shape {list(bias.shape)}"
        raise IntegrityError(f"{node}: N is {n} in the weight but its bias has {found}", AGAIN)
    if steps.shape != (n,):
        raise IntegrityError(
            f"{node}: N is {n} in the weight, and the scales of its bias are {list(steps.shape)}", AGAIN
        )


def _entry(source: Source, name: str, suffix: str, table: Table) -> Entry:
    if (name, suffix) not in table:
        raise IntegrityError(f"{source.node}: {name}, {suffix} is not in the file", AGAIN)
    return table[name, suffix]
