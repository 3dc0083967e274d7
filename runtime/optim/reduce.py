"""Sums the gradients of a step over all processes: sharded parameters in parts, all others as one buffer."""

from collections.abc import Sequence

from torch import Tensor

from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank
from specc.runtime.optim.masters import Masters


def mean_gradients(
    masters: Masters, banks: Sequence[Bank], world: World, micro_batches: int, clip_norm: float | None
) -> Tensor:
    """Converts the sums in `masters` into means over all micro-batches of all processes, and clips them.

    The host does not wait for a GPU, on which all these sums overlap.

    Args:
        masters: has the gradients of this process; receives the mean of the gradients that no bank has.
        banks: each receives the mean of this process's part of its matrices.
        world: the processes.
        micro_batches: the number of micro-batches of one process.
        clip_norm: the largest 2-norm over all gradients. None for no limit.

    Returns:
        The 2-norm before clipping, f32 [], with the same bits on every rank.
    """
    masters.attach()
    if world.size == 1:
        return masters.finish(micro_batches, clip_norm)
    pending = [bank.add_up() for bank in banks]
    world.add(masters.common)
    for sum_of_parts in pending:
        sum_of_parts.wait()
    local = [bank.gradient for bank in banks if bank.gradient is not None]
    return masters.finish(micro_batches * world.size, clip_norm, local, world.add)
