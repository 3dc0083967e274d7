"""The precision of f32 matrix products on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """A context manager that sets the precision of f32 matrix products on a GPU. If `wanted`, the operands of a product
    are rounded to TF32 (10 bits of mantissa); otherwise they are full f32 (23 bits).

    Sums are f32 in both cases. Code that is captured or compiled in the context keeps this precision. The context has
    no effect on products on a CPU, nor on cuDNN's LSTM, for which Torch has a separate TF32 setting.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
