"""Adds up the gradients of a step over all processes: Muon's matrices in parts, all else as one buffer."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specc.runtime.optim.masters import Masters
from specc.runtime.optim.muon import Bank


class Adding(Protocol):
    """The processes."""

    @property
    def size(self) -> int: ...

    def add(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all of them."""


def sum_up(
    masters: Masters, banks: Sequence[Bank], world: Adding, micro_batches: int, clip_norm: float | None
) -> Tensor:
    """The means over all `micro_batches` (of one process) of all processes, clipped to `clip_norm` by the norm of all
    of them; returns that norm before clipping, f32 [], on every rank the same bits.

    Each process gets its part of the gradients of `banks`, in them, and all of the others, in `masters`. The host does
    not wait for a GPU, where all these sums overlap.
    """
    masters.attach()
    if world.size == 1:
        return masters.finish(micro_batches, clip_norm)
    under_way = [bank.add_up() for bank in banks]
    world.add(masters.common)
    for one in under_way:
        one.wait()
    own = [bank.gradient for bank in banks if bank.gradient is not None]
    return masters.finish(micro_batches * world.size, clip_norm, own, world.add)
