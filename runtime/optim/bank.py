"""Banks: parameters of equal shape that are divided among the processes of a run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.runtime.distributed.world import Waiting, World


class Bank:
    """All matrices of one shape. Each process updates an equal part of the matrices.

    A process has the summed gradients and the optimizer state of its part. If the number of processes does not divide
    the number of matrices, matrices of zeros fill the last parts.

    Args:
        params: the matrices, f32 [rows, columns] each.
        world: the processes that train together.

    Attributes:
        local: the part of this process, as a slice of tensors [all matrices, ...].
        gradient: the gradients of the local matrices, f32 [local matrices, rows, columns], summed over all processes.
            The sum is valid after `add_up().wait()`. The address never changes, because a CUDA graph reads the tensor.
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
        """Returns a new state tensor of zeros, f32 [all matrices, *shape].

        Each process updates only its part of the tensor. `gather` copies the other parts from the other processes.
        """
        self._states.append(self.params[0].new_zeros(self._shape[0], *shape))
        return self._states[-1]

    def add_up(self) -> Waiting:
        """Starts to sum the gradients over all processes into `gradient`.

        Returns a handle; its method `wait` waits for the sum. Raises ValueError if a parameter has no gradient.
        """
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
        """Starts to gather the tensors `part` of all processes on every process.

        Returns a handle, whose method `wait` waits for the result, and the tensor [all matrices, rows, columns] that
        receives the result.
        """
        if self._world.size == 1:
            return Waiting(), part
        whole = part.new_empty(self._shape)
        return self._world.join_parts(part.contiguous(), whole), whole

    def gather(self) -> None:
        """Copies the state tensors of all parts to every process. All processes must call this method."""
        if self._world.size > 1:
            for state in self._states:
                self._world.join_parts(state[self.local].clone(), state).wait()


def banks_of(params: Sequence[Tensor], world: World) -> list[Bank]:
    """Groups the parameters into one bank per shape. The banks are sorted by descending total size."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for param in params:
        by_shape.setdefault(param.shape, []).append(param)
    banks = [Bank(same, world) for same in by_shape.values()]
    return sorted(banks, key=lambda bank: -len(bank.params) * bank.params[0].numel())
