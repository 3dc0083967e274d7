"""A batch of windows, and what sends it to its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    Batch = tuple[Tensor, Tensor]
else:
    Batch = Any  # token shards are packed and checked without torch


class Sender(Protocol):
    """`ahead` says that a batch should be sent before it is needed."""

    ahead: bool

    def send(self, windows: npt.NDArray[np.uint16]) -> Batch:
        """Inputs and targets, i64 [B, T], of windows [B, T + 1]; not to be used before `arrived`."""
        ...

    def arrived(self, batch: Batch) -> Batch:
        """The batch, for the current stream."""
        ...
