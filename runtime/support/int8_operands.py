"""Checks the operands of int8 products and LSTM steps at every call.

A kernel receives pointers without shapes, so it cannot detect wrong operands.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALIGNMENT = 16  # in bytes, the size of a vector load
QUAD = 4  # the number of elements of the state per vector load
Named = Mapping[str, tuple[Tensor, torch.dtype]]


class Operand(NamedTuple):
    """A tensor with its required shape and dtype.

    The tensor must be contiguous. There is one exception: if `state` is True, the row stride of a matrix may be larger
    than the number of columns.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    state: bool = False


def named(nodes: Sequence[str]) -> str:
    """Returns a text for error messages, which names the nodes that call a generated function."""
    return nodes[0] if len(nodes) == 1 else f"one of {', '.join(nodes)}"


def check_operands(
    nodes: Sequence[str],
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    extent: tuple[int, int],
    columns: Named | None = None,
    tiles: Named | None = None,
) -> None:
    """Checks the operands of an int8 product.

    All tensors must be contiguous (row-major), 16-byte aligned and on one device.

    Args:
        nodes: the names of the nodes that may have called the kernel, for error messages.
        x: the input, i8 [..., K].
        w: the weight, i8 [N, K].
        offset: the offset that is added to the sums, i32 [N].
        extent: (N, K) of the kernel.
        columns: other operands of shape [N], each with its dtype, by name.
        tiles: other operands of shape [..., N], each with its dtype, by name.

    Raises:
        ValueError: if an operand has a wrong shape, dtype, stride, alignment or device.
    """
    n, k = extent
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        depth = f"{w.shape[-1]} columns" if w.dim() == 2 else f"the shape {list(w.shape)}"
        raise ValueError(f"{named(nodes)}: the weight has {depth}, but its input has {x.shape[-1]} features")
    if w.shape != (n, k):
        raise ValueError(f"{named(nodes)}: the weight is {list(w.shape)}, but the kernel is for {[n, k]}")
    rows = x.shape[:-1]
    operands = [Operand("x", x, (*rows, k), torch.int8), Operand("w", w, (n, k), torch.int8)]
    operands += [Operand("offset", offset, (n,), torch.int32)]
    operands += [Operand(name, tensor, (n,), dtype) for name, (tensor, dtype) in (columns or {}).items()]
    operands += [Operand(name, tensor, (*rows, n), dtype) for name, (tensor, dtype) in (tiles or {}).items()]
    _require(nodes, operands)


def check_step(
    nodes: Sequence[str],
    h: Tensor,
    c: Tensor,
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    scale: Tensor,
    inverse: Tensor,
    extent: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Checks the operands of an LSTM step with an int8 product.

    All tensors must be on one device. All tensors except `h` and `c` must be contiguous and 16-byte aligned.

    Args:
        nodes: the names of the nodes that may have called the kernel, for error messages.
        h: the hidden state, [..., H] in `dtype`, aligned to the smaller of 4 elements and 16 bytes. If `h` is a matrix,
            its row stride may be larger than H, but must be a multiple of 4 elements.
        c: the cell state, with the shape, dtype, strides and alignment of h.
        x: the contribution of the input to the gates, f32 [..., 4H].
        w: the recurrent weight, i8 [4H, K].
        offset: the offset that is added to the sums, i32 [4H].
        scale: the scale of the sums, f32 [4H].
        inverse: the inverse scale of h, f32 [H].
        extent: (H, K) of the kernel.
        dtype: the dtype of the state.

    Raises:
        ValueError: if an operand has a wrong shape, dtype, stride, alignment or device.
    """
    size, k = extent
    rows, n = h.shape[:-1], 4 * size
    operands = (
        Operand("h", h, (*rows, size), dtype, state=True),
        Operand("c", c, (*rows, size), dtype, state=True),
        Operand("x", x, (*rows, n), torch.float32),
        Operand("w", w, (n, k), torch.int8),
        Operand("offset", offset, (n,), torch.int32),
        Operand("scale", scale, (n,), torch.float32),
        Operand("inverse", inverse, (size,), torch.float32),
    )
    _require(nodes, operands)


def _require(nodes: Sequence[str], operands: Sequence[Operand]) -> None:
    if problem := _misfit(operands):
        raise ValueError(f"{named(nodes)}: {problem}")


def _misfit(operands: Sequence[Operand]) -> str | None:
    """Returns a message about the first operand with a wrong dtype, shape, layout, device or alignment.

    Returns None if all operands are correct.
    """
    first = operands[0]
    for name, tensor, shape, dtype, state in operands:
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, and the kernel reads {dtype}"
        if tuple(tensor.shape) != shape:
            return f"{name} is {list(tensor.shape)}, and the kernel reads {list(shape)}"
        if not (tensor.is_contiguous() or (state and _spaced(tensor))):
            leading = f"rows {tensor.stride(0) if tensor.dim() else 0} elements apart"
            layout = f"features contiguous, and rows a multiple of {QUAD} apart" if state else "contiguous elements"
            return f"{name} {list(shape)} has strides {tensor.stride()}, {leading}; it must have {layout}"
        if tensor.device != first.tensor.device:
            return f"{name} is on {tensor.device}, and {first.name} on {first.tensor.device}"
        alignment = min(ALIGNMENT, QUAD * tensor.element_size()) if state else ALIGNMENT
        if not isinstance(tensor, FakeTensor) and tensor.data_ptr() % alignment:
            off = tensor.data_ptr() % alignment
            return f"{name} is not aligned to {alignment} bytes: it starts {off} bytes after a multiple of {alignment}"
    return None


def _spaced(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) % QUAD == 0
