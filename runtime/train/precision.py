"""How products of f32 numbers are computed on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """Within it, products of f32 matrices on a GPU read their factors with the 10 bits of mantissa of TF32 where it is
    `wanted`, and all 23 elsewhere; sums are f32. What is captured or compiled within it keeps that. The CPU's stay
    as they are. The library's LSTM follows a setting of its own, by which Torch lets it use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
