"""The random numbers of dropout in text models.

The numbers depend on the seed of the run, the step, the dropout node, and the index of a row in the step.
"""

import hashlib

import torch
from torch import Tensor, nn

from specc.compiler.passes.count_dropout import SUFFIX
from specc.runtime.distributed.world import World


class DropoutDraws:
    """Writes the keys and row numbers of dropout into the buffers of a model.

    A dropout node derives its random numbers from a key and the row numbers; see `specc.compiler.ops.dropout`. The
    sequences of a step are divided among W processes: process r computes the sequences r, r + W, r + 2 * W, ...

    Args:
        model: the model in training.
        seed: the seed of the run.
        rows: the number of windows per backward pass on this process.
        window: the number of tokens per window.
        world: the processes that train together.
    """

    def __init__(self, model: nn.Module, seed: int, rows: int, window: int, world: World) -> None:
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(SUFFIX)}
        self._seed, self._rows, self._window, self._world = seed, rows, window, world
        self._draws = torch.zeros(len(self._buffers), 4, dtype=torch.int64, device=world.device)
        for buffer, draw in zip(self._buffers.values(), self._draws, strict=True):
            buffer.data = draw  # all nodes share one buffer, so that a single copy to the device writes all values
        self._keys: tuple[int, list[int]] = (-1, [])

    def write(self, step: int, part: int) -> None:
        """Writes the keys and row numbers for one backward pass, without waiting for the device.

        Args:
            step: the number of optimizer updates before this step.
            part: the index of the backward pass in its step.
        """
        if not self._buffers:
            return
        if self._keys[0] != step:
            self._keys = step, [key_of(self._seed, step, name.removesuffix(SUFFIX)) for name in self._buffers]
        first = part * self._rows * self._world.size + self._world.rank
        rows: Tensor = torch.tensor([[key, first, self._world.size, self._window] for key in self._keys[1]])
        self._draws.copy_(rows.pin_memory() if self._draws.is_cuda else rows, non_blocking=True)


def key_of(seed: int, step: int, node: str) -> int:
    """Returns the key of the random numbers of a node in a step, an integer of 63 bits."""
    return int.from_bytes(hashlib.sha256(f"specc dropout {seed} {step} {node}".encode()).digest()[:8]) >> 1
