"""Products of int8 codes on a CPU, exact on every one."""

import torch
from torch import Tensor


def int8_sums(x: Tensor, w: Tensor) -> Tensor:
    """x i8 [..., K] times w i8 [N, K], row by row: the sums i32 [..., N], exact. Of a K that int32 holds."""
    rows = x.reshape(-1, x.shape[-1])
    sums = torch._int_mm(rows, w.T) if EXACT and rows.numel() else (rows.double() @ w.double().T).to(torch.int32)
    return sums.reshape(*x.shape[:-1], len(w))


def exact() -> bool:
    """Whether the library's product is exact here: a CPU that cannot add four products at once in int32 may add pairs
    in int16, and clip them. Where it is not, float64 is, which holds every sum."""
    ends = torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, 64).contiguous()
    wanted = torch.tensor([[1, -1], [-1, 1]]) * 64 * 127**2
    return torch.equal(torch._int_mm(ends, ends.T).long(), wanted)


EXACT = exact()  # asked once, with real tensors: what runs a model may have others
