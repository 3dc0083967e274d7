"""The stored arrays of int8 products: checks that they fit their products, and the tensors that the kernels read.

The checks read the table of arrays alone, before anything is decompressed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.int8.products import Source
from specc.compiler.ops.quantized import padded
from specc.compiler.quant.int8 import steps
from specc.runtime.artifact.layout import Layout
from specc.runtime.artifact.quantized_model import Array, QuantizedModel
from specc.runtime.artifact.table import AGAIN, ROWS, Entry, entries, require_layout, unpacked
from specc.runtime.errors import IntegrityError
from specc.runtime.model.load import Loaded

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


def constants(sources: Sequence[Source], stored: QuantizedModel) -> dict[str, Tensor]:
    """What the deployed programs keep beside their parameters, by name, on the CPU: of each product's weight [N, K] the
    `codes` i8, the `offset` i32 [N] (its bias, zeros without one) and the `scale` f32 [N] of the sums, N and K padded
    with zeros as the product takes them; where the input is two codes, `zeros` i32 [N] as the offset of the second; and
    once an input, the `inverse` f32 [K] of its scale.

    Raises IntegrityError, naming the product, where arrays do not fit the product or each other.
    """
    made: dict[str, Tensor] = {}
    table = entries(stored.tensors)
    for source in sources:
        n, k = stored.shapes[source.weight]
        weight = stored.tensors[source.weight]
        require_product(source, table, (n, k))
        shared = stored.tensors[source.leader]["input_scale"]
        if weight["input_scale"].tobytes() != shared.tobytes():
            said = f"share an input, but scale {_first_difference(weight['input_scale'], shared)}"
            raise IntegrityError(f"{source.node}: {source.weight} and {source.leader} {said}", AGAIN)
        scale = steps(weight)
        codes = torch.zeros(padded(n), padded(k), dtype=torch.int8)
        codes[:n, :k] = torch.from_numpy(weight["codes"].copy())
        offset = torch.zeros(padded(n), dtype=torch.int32)
        if source.bias:
            bias = stored.tensors[source.bias]
            if bias["scale"].tobytes() != scale.numpy().tobytes():
                message = f"{source.node}: {source.bias} was made for other scales than those of {source.weight}"
                raise IntegrityError(message, AGAIN)
            offset[:n] = torch.from_numpy(bias["codes"].copy())
        if stored.schemes[source.weight].input_bits == 16 and not source.made:
            made[f"{source.weight}_zeros"] = torch.zeros_like(offset)
        worth = torch.ones(padded(n))
        worth[:n] = scale
        made |= {f"{source.weight}_{name}": tensor for name, tensor in (("codes", codes), ("offset", offset))}
        made[f"{source.weight}_scale"] = worth
        inverse = 1.0 / torch.from_numpy(shared.copy())
        made[f"{source.leader}_inverse"] = inverse.expand(stored.shapes[source.leader][1]).contiguous()
    return made


def _first_difference(mine: Array, leader: Array) -> str:
    """Where the scales of one input differ."""
    if mine.shape != leader.shape:
        return f"it by {mine.size} and {leader.size} numbers"
    at = int((mine != leader).argmax())
    return f"it by {float(mine[at]):.9g} and {float(leader[at]):.9g}, at number {at}"


def fill(loaded: Loaded, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the constants of a module. Raises IntegrityError where names, shapes or dtypes differ."""
    found = dict(loaded.model.named_buffers())
    if odd := sorted(found.keys() ^ tensors.keys()):
        message = f"{len(odd)} constants have a place or a value, not both: {', '.join(odd[:5])}"
        raise IntegrityError(message, AGAIN)
    for name, buffer in found.items():
        have, want = tensors[name], (buffer.dtype, buffer.shape)
        if (have.dtype, have.shape) != want:
            shown = f"{have.dtype} {list(have.shape)} in the file but {buffer.dtype} {list(buffer.shape)}"
            raise IntegrityError(f"{name} is {shown} in the model", "the file is of another spec")
        buffer.copy_(have)
