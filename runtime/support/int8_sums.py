"""Exact products of int8 codes on any CPU."""

import torch
from torch import Tensor


def int8_sums(x: Tensor, w: Tensor) -> Tensor:
    """Returns the exact product of `x`, i8 [..., K], and the transpose of `w`, i8 [N, K], as i32 [..., N].

    K must be so small that the sums fit into int32.
    """
    rows = x.reshape(-1, x.shape[-1])
    sums = torch._int_mm(rows, w.T) if EXACT and rows.numel() else (rows.double() @ w.double().T).to(torch.int32)
    return sums.reshape(*x.shape[:-1], len(w))


def exact() -> bool:
    """Returns whether `torch._int_mm` is exact on this CPU.

    On some CPUs, `torch._int_mm` adds pairs of products in int16, which can saturate. On such a CPU, `int8_sums`
    computes in f64, which is always exact.
    """
    ends = torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, 64).contiguous()
    expected = torch.tensor([[1, -1], [-1, 1]]) * 64 * 127**2
    return torch.equal(torch._int_mm(ends, ends.T).long(), expected)


EXACT = exact()  # computed at import with real tensors, because a model may later run with fake tensors
