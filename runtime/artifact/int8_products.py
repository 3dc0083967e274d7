"""Stored arrays of int8 products: checks them against their products and computes the tensors that the kernels read.

The checks of a file need only its table of arrays, so that they run before any array is decompressed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.int8.editor import Source
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
    """Checks the table of arrays of a file against its int8 products, and then against its layout.

    Args:
        sources: the int8 products of the model.
        shapes: the shapes [N, K] of the weights, by name.
        layout: the stored arrays of the artifact.
        text: the table of arrays of the file; empty if it has none.

    Raises:
        IntegrityError: the table is missing, or a dtype, shape or memory order differs. The message states the node or
            array, the expected value and the stored value.
    """
    if not text:
        raise IntegrityError("it does not say what the arrays of its int8 products are", AGAIN)
    table = unpacked(text)
    for source in sources:
        n, k = shapes[source.weight]
        require_product(source, table, (n, k))
    require_layout(table, layout)


def require_product(source: Source, table: Table, extent: tuple[int, int]) -> None:
    """Checks the arrays of one product of `extent` (N, K).

    Raises IntegrityError if an array is missing or its dtype, shape or memory order differs. The message states the
    node, the expected value and the stored value.
    """
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
    """Returns the constants of the deployed int8 programs, by name, on the CPU.

    For each product with a weight [N, K], where N and K are padded as its kernel requires:

    - `WEIGHT_codes`, i8 [N, K], padded with zeros.
    - `WEIGHT_offset`, i32 [N]: the bias, or zeros without a bias.
    - `WEIGHT_scale`, f32 [N], padded with ones: the factor of the i32 sums.
    - `WEIGHT_zeros`, i32 [N]: the offset of the second code, if the input is stored as two codes (16 bits).

    For each input, under the name of its leader: `LEADER_inverse`, f32 [K] without padding, the inverse of its scale.

    Raises IntegrityError, which names the product, if arrays do not fit the product or each other.
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
    """Describes the first difference between the input scales of a weight and of its leader, for a message."""
    if mine.shape != leader.shape:
        return f"it by {mine.size} and {leader.size} numbers"
    at = int((mine != leader).argmax())
    return f"it by {float(mine[at]):.9g} and {float(leader[at]):.9g}, at number {at}"


def fill(loaded: Loaded, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the buffers of a module. Raises IntegrityError if names, shapes or dtypes differ."""
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
