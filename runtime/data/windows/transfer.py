"""Copies batches of windows from host memory to the device of the model."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Windows = npt.NDArray[np.uint16 | np.uint32]  # [B, T + 1]


class Transfer:
    """Copies batches of windows to a device.

    For a GPU, the windows are copied from pinned memory on a separate CUDA stream, and converted to i64 on the GPU.

    Attributes:
        ahead: whether the copy can overlap with computation. If so, call `send` before the batch is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.ahead = self._stream is not None

    def send(self, windows: Windows) -> Batch:
        """Starts to copy windows to the device. Returns the inputs and the targets, i64 [B, T] each.

        Pass the returned batch to `arrived` before you use it.
        """
        # ids are below 2**31, and Torch has more kernels for i32 than for u32
        tokens = torch.from_numpy(windows.view(np.int32) if windows.dtype.itemsize == 4 else windows)
        if self._stream is not None:
            tokens = tokens.pin_memory()
        with torch.cuda.stream(self._stream):  # without effect if the stream is None
            tokens = tokens.to(self._device, non_blocking=True)
            dense = torch.contiguous_format
            return tokens[:, :-1].to(torch.int64, memory_format=dense), tokens[:, 1:].to(
                torch.int64, memory_format=dense
            )

    def arrived(self, batch: Batch) -> Batch:
        """Makes the current CUDA stream wait until `batch` has been copied. Returns the batch."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in batch:
                tensor.record_stream(current)  # delays the reuse of the memory until `current` has finished
        return batch
