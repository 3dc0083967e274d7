"""The precision of f32 matrix products on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """A context manager that sets the precision of f32 matrix products on a GPU.

    If `wanted` is True, products round their operands to TF32 (10 bits of mantissa). Otherwise, products read their
    operands in full f32 (23 bits of mantissa). Sums are f32 in both cases. Code that is captured or compiled inside the
    context keeps this precision after the context ends. The context affects neither CPUs nor the LSTM of cuDNN.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
