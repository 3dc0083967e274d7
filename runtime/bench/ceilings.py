"""The ceilings that every kernel is compared with, measured in the same run: a large GEMM and a large copy. For kernels
that write very little, a large sum replaces the copy."""

from dataclasses import dataclass
from typing import Literal

import torch

from specc.runtime.bench.timing import Measured, alternate

SIZES = {"cuda": (8192, 2 << 30), "cpu": (1024, 128 << 20)}  # N of an N x N x N GEMM, bytes of a tensor to copy
NEXT_TO_NOTHING = 1 / 16  # of the bytes: memory is faster if it need not switch between reading and writing


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured ceilings of a device.

    Attributes:
        dtype: the dtype of the GEMM.
        size: N of the GEMM.
        gemm: the library's product of two N x N matrices.
        copied: the bytes that `copy` and `read` process.
        copy: a copy from device memory to device memory, which reads and writes `copied` bytes.
        read: a sum, which only reads `copied` bytes.
    """

    dtype: str
    size: int
    gemm: Measured
    copied: int
    copy: Measured
    read: Measured

    @property
    def flops_per_second(self) -> float:
        return 2 * self.size**3 / (1e-3 * self.gemm.ms)

    @property
    def bytes_per_second(self) -> float:
        return 2 * self.copied / (1e-3 * self.copy.ms)

    @property
    def read_per_second(self) -> float:
        """Bytes read per second. At least the rate of the copy, because a sum on a CPU may be limited by its
        additions."""
        return max(self.copied / (1e-3 * self.read.ms), self.bytes_per_second)

    def floor_ms(self, flops: int, moved: int, written: int) -> float:
        """Returns the least time in ms, about, of work with `flops` operations that moves `moved` bytes, of which
        `written` are written."""
        return 1e3 * max(flops / self.flops_per_second, moved / self._speed(moved, written))

    def bound(self, flops: int, moved: int, written: int) -> Literal["FLOPs", "bytes"]:
        """Returns which of the two determines the floor."""
        return "FLOPs" if flops / self.flops_per_second > moved / self._speed(moved, written) else "bytes"

    def _speed(self, moved: int, written: int) -> float:
        return self.read_per_second if written <= moved * NEXT_TO_NOTHING else self.bytes_per_second


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures all ceilings on random normal data."""
    size, copied = SIZES[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    gemm = alternate({"gemm": lambda: torch.mm(a, b, out=out)}, device, 3 * a.nbytes)["gemm"]
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = alternate({"copy": lambda: target.copy_(source)}, device, 2 * copied)["copy"]
    read = alternate({"read": source.sum}, device, copied)["read"]
    return Ceilings(str(dtype).removeprefix("torch."), size, gemm, copied, copy, read)
