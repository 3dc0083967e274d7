"""Measures the peak rates of a device: operations per second and bytes per second. The benchmark compares every kernel
with these rates.

Each benchmark measures the rates itself, with a large matrix product and a large copy. A sum only reads memory. The
rate of a large sum is therefore the reference for kernels that write very little.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from specc.runtime.bench.timing import Measured, alternate

# For each device: N of the N x N x N matrix product, and the number of bytes of the copied tensor
SIZES = {"cuda": (8192, 2 << 30), "cpu": (1024, 128 << 20)}
NEXT_TO_NOTHING = 1 / 16  # if at most this fraction of the bytes is written, memory is faster than in a copy


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work of one call of a kernel or a group: the number of arithmetic operations, the number of bytes
    that are read or written, and the number of bytes that are written.
    """

    flops: int
    bytes: int
    bytes_written: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.bytes_written + other.bytes_written)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured peak rates of a device.

    Attributes:
        dtype: the dtype of the matrix product.
        gemm_size: N, the number of rows and columns of both matrices.
        gemm: the time in which the library multiplies two N x N matrices.
        copy_bytes: the size in bytes of the tensor that is copied or summed.
        copy: the time of copying the tensor in device memory.
        read: the time of summing the tensor.
    """

    dtype: str
    gemm_size: int
    gemm: Measured
    copy_bytes: int
    copy: Measured
    read: Measured

    @property
    def flops_per_second(self) -> float:
        return 2 * self.gemm_size**3 / (1e-3 * self.gemm.ms)

    @property
    def bytes_per_second(self) -> float:
        return 2 * self.copy_bytes / (1e-3 * self.copy.ms)

    @property
    def read_bytes_per_second(self) -> float:
        """The rate of reading memory: the larger of the rates of `read` and `copy`. On a CPU, `read` can be slower than
        `copy`, because a sum also performs additions.
        """
        return max(self.copy_bytes / (1e-3 * self.read.ms), self.bytes_per_second)

    def floor_ms(self, work: Work) -> float:
        return 1e3 * max(self._seconds(work))

    def bound(self, work: Work) -> Literal["FLOPs", "bytes"]:
        flops, memory = self._seconds(work)
        return "FLOPs" if flops > memory else "bytes"

    def _seconds(self, work: Work) -> tuple[float, float]:
        reads = work.bytes_written <= work.bytes * NEXT_TO_NOTHING
        speed = self.read_bytes_per_second if reads else self.bytes_per_second
        return work.flops / self.flops_per_second, work.bytes / speed


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures the peak rates of `device` on normally distributed random data.

    `dtype` is the dtype of the matrix product.
    """
    size, copied = SIZES[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    gemm = alternate({"gemm": lambda: torch.mm(a, b, out=out)}, device, 3 * a.nbytes)["gemm"]
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = alternate({"copy": lambda: target.copy_(source)}, device, 2 * copied)["copy"]
    read = alternate({"read": source.sum}, device, copied)["read"]
    return Ceilings(str(dtype).removeprefix("torch."), size, gemm, copied, copy, read)
