"""What an int8 product, or a step with one, is given, checked each time it is launched: pointers carry no shapes, so
nothing else would."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALIGNMENT = 16  # bytes that one load takes
QUAD = 4  # elements of a state that one load takes
Given = Mapping[str, tuple[Tensor, torch.dtype]]


class Wanted(NamedTuple):
    """A tensor and what it has to be. A `state` that is a matrix may have rows further apart."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    state: bool = False


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
    """As `check_operands`, for a step of an LSTM of `extent` H and K: h and c are [..., H] in `dtype`, x f32 [..., 4H],
    w i8 [4H, K] row by row, offset i32 and scale f32 [4H], inverse f32 [H]. Rows of h and c may be further apart, where
    these are matrices."""
    size, k = extent
    rows, n = h.shape[:-1], 4 * size
    wanted = (
        Wanted("h", h, (*rows, size), dtype, state=True),
        Wanted("c", c, (*rows, size), dtype, state=True),
        Wanted("x", x, (*rows, n), torch.float32),
        Wanted("w", w, (n, k), torch.int8),
        Wanted("offset", offset, (n,), torch.int32),
        Wanted("scale", scale, (n,), torch.float32),
        Wanted("inverse", inverse, (size,), torch.float32),
    )
    if reason := _misfit(wanted):
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
    wanted = [Wanted("x", x, (*rows, k), torch.int8), Wanted("w", w, (n, k), torch.int8)]
    wanted += [Wanted("offset", offset, (n,), torch.int32)]
    wanted += [Wanted(name, tensor, (n,), dtype) for name, (tensor, dtype) in columns.items()]
    wanted += [Wanted(name, tensor, (*rows, n), dtype) for name, (tensor, dtype) in tiles.items()]
    return _misfit(wanted)


def _misfit(wanted: Sequence[Wanted]) -> str | None:
    """What of some tensors does not fit, where all lie on the device of the first; None where all do."""
    first = wanted[0]
    for name, tensor, shape, dtype, state in wanted:
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, and the kernel reads {dtype}"
        if tuple(tensor.shape) != shape:
            return f"{name} is {list(tensor.shape)}, and the kernel reads {list(shape)}"
        if not (tensor.is_contiguous() or (state and _spaced(tensor))):
            leading = f"rows {tensor.stride(0) if tensor.dim() else 0} elements apart"
            wants = f"features contiguous, and rows a multiple of {QUAD} apart" if state else "them contiguous"
            return f"{name} {list(shape)} has strides {tensor.stride()}, {leading}; wants {wants}"
        if tensor.device != first.tensor.device:
            return f"{name} is on {tensor.device}, and {first.name} on {first.tensor.device}"
        alignment = min(ALIGNMENT, QUAD * tensor.element_size()) if state else ALIGNMENT
        if not isinstance(tensor, FakeTensor) and tensor.data_ptr() % alignment:
            off = tensor.data_ptr() % alignment
            return f"{name} starts {off} bytes behind a multiple of {alignment}; wants it aligned"
    return None


def _spaced(tensor: Tensor) -> bool:
    """Whether it is a matrix of rows that one load after another reads."""
    return tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) % QUAD == 0
