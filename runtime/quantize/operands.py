"""What an int8 product is given, checked each time it is launched: pointers carry no shapes, so nothing else would."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALIGNMENT = 16  # bytes that one load takes
Given = Mapping[str, tuple[Tensor, torch.dtype]]


def named(nodes: Sequence[str]) -> str:
    """The nodes that one function computes, for a message: whichever called it is among them."""
    return nodes[0] if len(nodes) == 1 else f"one of {', '.join(nodes)}"


def check_operands(
    nodes: Sequence[str],
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    extent: tuple[int, int],
    columns: Given | None = None,
    tiles: Given | None = None,
) -> None:
    """Raises ValueError, naming the nodes that may have called, unless x is i8 [..., K] and w i8 [N, K] row by row,
    offset i32 [N], `columns` are of [N] and `tiles` of [..., N] in the dtype beside each, and all are contiguous,
    16-byte aligned, on one device."""
    if reason := _refused(x, w, offset, extent, columns or {}, tiles or {}):
        raise ValueError(f"{named(nodes)}: {reason}")


def _refused(x: Tensor, w: Tensor, offset: Tensor, extent: tuple[int, int], columns: Given, tiles: Given) -> str | None:
    """What does not fit; None where all does."""
    n, k = extent
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        shown = w.shape[-1] if w.dim() == 2 else list(w.shape)
        return f"K is {shown} in the weight but its input has {x.shape[-1]} features"
    if w.shape != (n, k):
        return f"the weight is {list(w.shape)}, and the kernel is for N {n} and K {k}"
    rows = x.shape[:-1]
    wanted = [("x", x, (*rows, k), torch.int8), ("w", w, (n, k), torch.int8), ("offset", offset, (n,), torch.int32)]
    wanted += [(name, tensor, (n,), dtype) for name, (tensor, dtype) in columns.items()]
    wanted += [(name, tensor, (*rows, n), dtype) for name, (tensor, dtype) in tiles.items()]
    for name, tensor, shape, dtype in wanted:
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, and the kernel reads {dtype}"
        if tuple(tensor.shape) != tuple(shape):
            return f"{name} is {list(tensor.shape)}, and the kernel reads {list(shape)}"
        if not tensor.is_contiguous():
            leading = f"rows {tensor.stride(0) if tensor.dim() else 0} elements apart"
            return f"{name} {list(shape)} has strides {tensor.stride()}, {leading}; wants them contiguous"
        if tensor.device != x.device:
            return f"{name} is on {tensor.device}, and x on {x.device}"
        if not isinstance(tensor, FakeTensor) and tensor.data_ptr() % ALIGNMENT:
            off = tensor.data_ptr() % ALIGNMENT
            return f"{name} starts {off} bytes behind a multiple of {ALIGNMENT}; wants it aligned"
    return None
