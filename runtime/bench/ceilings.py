"""The ceilings that every kernel is held to, measured in the same run: a large GEMM, and a large copy; where a kernel
writes next to nothing, a large sum instead of the copy."""

from dataclasses import dataclass
from typing import Literal

import torch

from specc.runtime.bench.timing import Measured, alternate

SIZES = {"cuda": (8192, 2 << 30), "cpu": (1024, 128 << 20)}  # N of an N x N x N GEMM, bytes of a tensor to copy
NEXT_TO_NOTHING = 1 / 16  # of the bytes: memory that need not turn from reading to writing is faster


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`gemm` is a product of two N x N matrices in `dtype` by the library, N being `size`; `copy` a copy of `copied`
    bytes from device memory to device memory, which reads and writes each once; `read` a sum of as many bytes, which
    only reads them."""

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
        """Bytes; at least what a copy moves, as a sum on a CPU may wait for its additions."""
        return max(self.copied / (1e-3 * self.read.ms), self.bytes_per_second)

    def floor_ms(self, flops: int, moved: int, written: int) -> float:
        """No version that does so many operations and moves so many bytes, of which it writes `written`, runs much
        faster."""
        return 1e3 * max(flops / self.flops_per_second, moved / self._speed(moved, written))

    def bound(self, flops: int, moved: int, written: int) -> Literal["FLOPs", "bytes"]:
        """Which of the two makes the floor."""
        return "FLOPs" if flops / self.flops_per_second > moved / self._speed(moved, written) else "bytes"

    def _speed(self, moved: int, written: int) -> float:
        return self.read_per_second if written <= moved * NEXT_TO_NOTHING else self.bytes_per_second


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures all ceilings, on random normal data."""
    size, copied = SIZES[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    gemm = alternate({"gemm": lambda: torch.mm(a, b, out=out)}, device, 3 * a.nbytes)["gemm"]
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = alternate({"copy": lambda: target.copy_(source)}, device, 2 * copied)["copy"]
    read = alternate({"read": source.sum}, device, copied)["read"]
    return Ceilings(str(dtype).removeprefix("torch."), size, gemm, copied, copy, read)
