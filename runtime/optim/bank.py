"""Banks: matrices of the same shape, sharded over the processes that train together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.distributed.world import Waiting, World


class Bank:
    """All matrices of one shape. Each process has an equal part of the matrices: it sums their gradients and stores
    their state. The last parts are padded with zero matrices.

    Args:
        params: f32 [rows, columns] each.
        world: the processes.

    Attributes:
        local: the matrices of this process, as a slice of [all matrices, ...].
        gradient: f32 [local matrices, rows, columns]. It is valid after the pending call of `add_up` is complete. With
            several processes, it is the sum over the processes. The address never changes, because a CUDA graph of the
            update reads it.
    """

    def __init__(self, params: Sequence[Tensor], world: World) -> None:
        self.params, self._world = list(params), world
        each = -(-len(params) // world.size)
        self._shape = (each * world.size, *params[0].shape)
        self.local = slice(world.rank * each, (world.rank + 1) * each)
        self.gradient: Tensor | None = None
        self._sum = params[0].new_zeros(each, *params[0].shape) if world.size > 1 else None
        self._states: list[Tensor] = []

    def new_state(self, *shape: int) -> Tensor:
        """Returns new state of zeros, f32 [all matrices, *shape]. The state for matrices of other processes is only
        current after `gather`."""
        self._states.append(self.params[0].new_zeros(self._shape[0], *shape))
        return self._states[-1]

    def add_up(self) -> Waiting:
        """Begins to sum the gradients of the parameters into `gradient`. Raises ValueError if a parameter has no
        gradient."""
        gradients = [param.grad for param in self.params if param.grad is not None]
        if len(gradients) < len(self.params):
            raise ValueError("an update needs the gradient of every parameter")
        if self._sum is None:
            self.gradient = torch.stack(gradients)
            return Waiting()
        padding = [torch.zeros_like(gradients[0])] * (self._shape[0] - len(gradients))
        self.gradient = self._sum
        return self._world.add_parts(torch.stack([*gradients, *padding]), self._sum)

    def join(self, part: Tensor) -> tuple[Waiting, Tensor]:
        """Begins an all-gather of `part`. Returns the pending call and its result, [all matrices, rows, columns], in
        the dtype of `part`."""
        if self._world.size == 1:
            return Waiting(), part
        whole = part.new_empty(self._shape)
        return self._world.join_parts(part.contiguous(), whole), whole

    def gather(self) -> None:
        """Fetches the state for the matrices of other processes. All processes must call this."""
        if self._world.size > 1:
            for state in self._states:
                self._world.join_parts(state[self.local].clone(), state).wait()


def banks_of(params: Sequence[Tensor], world: World) -> list[Bank]:
    """Groups the parameters into one bank per shape, largest total size first."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for param in params:
        by_shape.setdefault(param.shape, []).append(param)
    banks = [Bank(same, world) for same in by_shape.values()]
    return sorted(banks, key=lambda bank: -len(bank.params) * bank.params[0].numel())
