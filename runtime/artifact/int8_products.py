"""Checks the stored arrays of int8 matrix products, and computes the tensors that the int8 kernels read.

The checks need only the table of arrays, so they can run before any array is decompressed.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.int8.editor import Source
from specc.compiler.ops.quantized import padded
from specc.compiler.quant.int8 import steps
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.artifact.table import AGAIN, ROWS, Array, Entry, Layout, entries, require_layout, unpacked
from specc.runtime.errors import IntegrityError
from specc.runtime.model.load import Loaded

Table = Mapping[tuple[str, str], Entry]


def require_products(
    sources: Sequence[Source], shapes: Mapping[str, tuple[int, ...]], layout: Layout, text: bytes
) -> None:
    """Checks that the table of arrays in a file matches the int8 products of the model and the layout.

    Args:
        sources: the int8 products of the model.
        shapes: the shapes [N, K] of the weights, by name.
        layout: the stored arrays of the artifact.
        text: the table of arrays; empty if the file has none.

    Raises:
        IntegrityError: if the table or an array is missing, or an array has a wrong dtype, shape or memory order.
    """
    if not text:
        raise IntegrityError("the artifact has int8 products but no table of arrays", AGAIN)
    table = unpacked(text)
    for source in sources:
        n, k = shapes[source.weight]
        require_product(source, table, (n, k))
    require_layout(table, layout)


def require_product(source: Source, table: Table, extent: tuple[int, int]) -> None:
    """Checks that the table describes the arrays of one int8 product. `extent` is (N, K), for N output features and K
    input features.

    Raises IntegrityError if an array is not in the table, or has a wrong dtype, shape or memory order.
    """
    if problem := next(_mismatches(source, table, *extent), None):
        raise IntegrityError(f"{source.node}: {problem}", AGAIN)


def _mismatches(source: Source, table: Table, n: int, k: int) -> Iterator[str]:
    arrays = [(source.weight, suffix) for suffix in ("codes", "scale", "input_scale")]
    arrays += [(source.bias, suffix) for suffix in ("codes", "scale") if source.bias]
    yield from (f"{', '.join(array)} is not in the file" for array in arrays if array not in table)
    codes, scale, input_scale, *bias = (table[array] for array in arrays)
    if codes.dtype != "i8":
        yield f"the weight is stored as {codes.dtype}, but its product reads i8"
    if len(codes.shape) != 2 or codes.shape[1] != k:
        stored_k = f"{codes.shape[1]} columns" if len(codes.shape) == 2 else f"the shape {list(codes.shape)}"
        transposed = ": the weight is stored transposed" if codes.shape == (k, n) else ""
        yield f"the weight has {stored_k}, but its input has {k} features ({source.maker}){transposed}"
    if codes.shape[0] != n:
        yield f"the weight has {codes.shape[0]} rows, and the model has {n}"
    if codes.order != ROWS:
        yield f"the weight [{n}, {k}] is stored by {codes.order}, but its kernel reads it by {ROWS}"
    if scale.shape != (n,):
        yield f"the weight has {n} rows, but its scales have the shape {list(scale.shape)}"
    if input_scale.shape not in ((1,), (k,)):
        yield f"the input has {k} features ({source.maker}), but its scales have the shape {list(input_scale.shape)}"
    if not bias:
        return
    if bias[0].dtype != "i32":
        yield f"the bias is stored as {bias[0].dtype}, but is added to i32 sums"
    if bias[0].shape != (n,):
        size = f"{bias[0].shape[0]} numbers" if len(bias[0].shape) == 1 else f"the shape {list(bias[0].shape)}"
        yield f"the weight has {n} rows, but its bias has {size}"
    if bias[1].shape != (n,):
        yield f"the weight has {n} rows, but the scales of its bias have the shape {list(bias[1].shape)}"


def constants(sources: Sequence[Source], stored: QuantizedModel) -> dict[str, Tensor]:
    """Returns the constants of int8 programs by name, on the CPU.

    The result has these tensors for each product with a weight [N, K]. N and K are padded as the kernel requires.
    WEIGHT stands for the name of the weight.

    - `WEIGHT_codes`, i8 [N, K], padded with zeros.
    - `WEIGHT_offset`, i32 [N]: the bias, or zeros if the product has no bias.
    - `WEIGHT_scale`, f32 [N], padded with ones: the factors by which the i32 sums are multiplied.
    - `WEIGHT_zeros`, i32 [N]: zeros. This tensor exists only for products with 16-bit inputs. A 16-bit input consists
      of two int8 codes. The weight is multiplied by each code. `WEIGHT_offset` is added to the product of the first
      code, and `WEIGHT_zeros` is added to the product of the second code.

    The result also has a tensor `LEADER_inverse` for each input, f32 [K] without padding: the inverse of the input
    scale. LEADER stands for the name of the first weight that reads the input.

    Raises IntegrityError if stored arrays do not match the product, or do not match one another. The message names the
    product.
    """
    tensors: dict[str, Tensor] = {}
    table = entries(stored.tensors)
    for source in sources:
        n, k = stored.shapes[source.weight]
        weight, leader = stored.tensors[source.weight], stored.tensors[source.leader]
        require_product(source, table, (n, k))
        if weight["input_scale"].tobytes() != leader["input_scale"].tobytes():
            difference = _first_difference(weight["input_scale"], leader["input_scale"])
            message = (
                f"{source.weight} and {source.leader} share an input, but have different input scales: {difference}"
            )
            raise IntegrityError(f"{source.node}: {message}", AGAIN)
        codes = torch.zeros(padded(n), padded(k), dtype=torch.int8)
        codes[:n, :k] = torch.from_numpy(weight["codes"].copy())
        scale = torch.ones(padded(n))
        scale[:n] = steps(weight)
        offset = torch.zeros(padded(n), dtype=torch.int32)
        if source.bias:
            bias = stored.tensors[source.bias]
            if bias["scale"].tobytes() != scale[:n].numpy().tobytes():
                message = f"{source.bias} was quantized with other scales than those of {source.weight}"
                raise IntegrityError(f"{source.node}: {message}", AGAIN)
            offset[:n] = torch.from_numpy(bias["codes"].copy())
        if stored.schemes[source.weight].input_bits == 16 and not source.outputs:
            tensors[f"{source.weight}_zeros"] = torch.zeros_like(offset)
        for name, tensor in (("codes", codes), ("offset", offset), ("scale", scale)):
            tensors[f"{source.weight}_{name}"] = tensor
        inverse = 1.0 / torch.from_numpy(leader["input_scale"].copy())
        tensors[f"{source.leader}_inverse"] = inverse.expand(stored.shapes[source.leader][1]).contiguous()
    return tensors


def _first_difference(scale: Array, leader: Array) -> str:
    if scale.shape != leader.shape:
        return f"{scale.size} and {leader.size} numbers"
    at = int((scale != leader).argmax())
    return f"{float(scale[at]):.9g} and {float(leader[at]):.9g}, at index {at}"


def fill(loaded: Loaded, tensors: Mapping[str, Tensor]) -> None:
    """Copies each tensor into the buffer of the module with the same name. Raises IntegrityError if the tensors and the
    buffers differ in names, shapes or dtypes.
    """
    buffers = dict(loaded.model.named_buffers())
    if unpaired := sorted(buffers.keys() ^ tensors.keys()):
        message = f"{len(unpaired)} constants lack a buffer or a value: {', '.join(unpaired[:5])}"
        raise IntegrityError(message, AGAIN)
    for name, buffer in buffers.items():
        stored = tensors[name]
        if (stored.dtype, stored.shape) != (buffer.dtype, buffer.shape):
            forms = f"{stored.dtype} {list(stored.shape)} in the file but {buffer.dtype} {list(buffer.shape)}"
            raise IntegrityError(f"{name} is {forms} in the model", "the file belongs to another spec")
        buffer.copy_(stored)
