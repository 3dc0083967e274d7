"""The precision of f32 matrix products on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """A context manager that sets the precision of f32 matrix products on a GPU.

    If `wanted`, operands are rounded to TF32 (10 bits of mantissa). Otherwise they are full f32 (23 bits). Sums are f32
    in both cases. Code that is captured or compiled in the context keeps this precision. The context does not affect
    CPUs. It does not affect the LSTM of cuDNN either.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
