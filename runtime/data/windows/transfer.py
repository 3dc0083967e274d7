"""Transfers batches of windows to the device that uses them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Transfer(Protocol):
    """A transfer of windows to a device. `ahead` is whether a batch should be sent before it is needed."""

    ahead: bool

    def send(self, windows: npt.NDArray[np.uint16]) -> Batch:
        """Starts to copy windows, u16 [B, T + 1], and returns inputs and targets, i64 [B, T].

        The result must be passed to `arrived` before it is used.
        """
        ...

    def arrived(self, batch: Batch) -> Batch:
        """Returns the batch, which the device's current stream may now use."""
        ...


class HostTransfer:
    """A transfer that leaves batches on the CPU."""

    ahead = False

    def send(self, windows: npt.NDArray[np.uint16]) -> Batch:
        return _inputs_and_targets(torch.from_numpy(windows))

    def arrived(self, batch: Batch) -> Batch:
        return batch


class OverlappedTransfer:
    """A transfer to a GPU from pinned memory on a separate CUDA stream, which overlaps with computation.

    Tokens are copied as u16 and converted to i64 on the GPU.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, windows: npt.NDArray[np.uint16]) -> Batch:
        pinned = torch.from_numpy(windows).pin_memory()
        with torch.cuda.stream(self._stream):
            return _inputs_and_targets(pinned.to(self._device, non_blocking=True))

    def arrived(self, batch: Batch) -> Batch:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in batch:
            tensor.record_stream(current)  # so that its memory is not reused before `current` has finished
        return batch


def transfer_to(device: torch.device | str) -> Transfer:
    place = torch.device(device)
    return OverlappedTransfer(place) if place.type == "cuda" else HostTransfer()


def _inputs_and_targets(windows: Tensor) -> Batch:
    inputs, targets = windows[:, :-1], windows[:, 1:]
    dense = torch.contiguous_format
    return inputs.to(torch.int64, memory_format=dense), targets.to(torch.int64, memory_format=dense)
