"""Windows of tokens on their way to where they are used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specc.runtime.data.windows.batch import Batch, Sender


class Here:
    """To the CPU."""

    ahead = False

    def send(self, windows: npt.NDArray[np.uint16]) -> Batch:
        return _split(torch.from_numpy(windows))

    def arrived(self, batch: Batch) -> Batch:
        return batch


class Overlapping:
    """To a GPU, from pinned memory and on a stream of its own; neither the host nor the device waits for a copy.

    Copied as the 16 bits they are stored in, and widened on the GPU.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, windows: npt.NDArray[np.uint16]) -> Batch:
        pinned = torch.from_numpy(windows).pin_memory()
        with torch.cuda.stream(self._stream):
            return _split(pinned.to(self._device, non_blocking=True))

    def arrived(self, batch: Batch) -> Batch:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in batch:
            tensor.record_stream(
                current
            )  # freed by the host, its memory is not reused before `current` is done with it
        return batch


def sender_to(device: torch.device | str) -> Sender:
    place = torch.device(device)
    return Overlapping(place) if place.type == "cuda" else Here()


def _split(windows: Tensor) -> Batch:
    inputs, targets = windows[:, :-1], windows[:, 1:]
    dense = torch.contiguous_format
    return inputs.to(torch.int64, memory_format=dense), targets.to(torch.int64, memory_format=dense)
