"""The base class of update rules for matrices. The processes of a run divide the updates among themselves."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.runtime.distributed.world import Waiting, World
from specc.runtime.optim.bank import Bank, banks_of
from specc.runtime.optim.update_rule import S, UpdateRule


class MatrixRule(UpdateRule[S]):
    """Updates all matrices of one shape together. A parameter [experts, rows, columns] has one matrix per expert.

    Each process sums the gradients, stores the state and computes the updates for its part of the matrices. The
    processes then exchange their updates.
    """

    sharded = True

    def __init__(self, spec: S, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self.banks = banks_of(list(parameters.values()), world)
        super().__init__(spec, parameters, world)

    def new_slot(self) -> list[Tensor]:
        return [bank.new_state(*bank.params[0].shape) for bank in self.banks]

    def new_counts(self) -> list[Tensor]:
        return [bank.new_state(*[1] * bank.params[0].dim()) for bank in self.banks]

    def local(self, slot: Sequence[Tensor]) -> list[Tensor]:
        return [tensor[bank.local] for bank, tensor in zip(self.banks, slot, strict=True)]

    def by_name(self, slot: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.banks, slot, strict=True)
        return {name: matrix for bank, tensor in pairs for name, matrix in self.matrices(bank, tensor).items()}

    def matrices(self, bank: Bank, tensor: Tensor) -> dict[str, Tensor]:
        """Splits a state tensor [all matrices, ...] of a bank into the parts of the parameters.

        Returns the parts by parameter name.
        """
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        # The padding matrices at the end of `tensor` belong to no parameter
        return {names[id(param)]: matrix for param, matrix in zip(bank.params, tensor, strict=False)}

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of each bank, f32 [local matrices, ..., rows, columns], summed over the processes."""
        for bank in self.banks:
            if bank.gradient is None:
                bank.add_up().wait()
        return [bank.gradient for bank in self.banks if bank.gradient is not None]

    def discard(self) -> None:
        for bank in self.banks:
            bank.gradient = None

    @abstractmethod
    def direction(self, index: int, gradient: Tensor, work: str, numbers: Sequence[Tensor]) -> Tensor:
        """Updates the state of a bank, and returns the update directions of the local matrices.

        Args:
            index: the index of the bank.
            gradient: the gradient of the local matrices, f32 [local matrices, ..., rows, columns].
            work: the kind of update, as in the method `update`.
            numbers: the values of the settings in `scheduled`, as tensors of shape [].

        Returns:
            The directions, f32 [local matrices, ..., rows, columns].
        """

    def factor(self, rows: int, columns: int) -> float:
        return 1.0

    def exact_in_bf16(self, direction: Tensor) -> bool:
        """Returns whether `direction` can be converted to bf16 without a loss of precision."""
        return False

    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        lr, *others = numbers
        self.gradients()
        pending: list[tuple[Bank, Waiting, Tensor]] = []
        for index, bank in enumerate(self.banks):
            assert bank.gradient is not None
            part, bank.gradient = self.direction(index, bank.gradient, work, others), None
            sent = part.bfloat16() if self.world.size > 1 and self.exact_in_bf16(part) else part
            pending.append((bank, *bank.join(sent)))
            if len(pending) > 1:  # the update of the previous bank was sent while the update of this bank was computed
                self._apply(*pending.pop(0), lr)
        for last in pending:
            self._apply(*last, lr)

    def _apply(self, bank: Bank, pending: Waiting, directions: Tensor, lr: Tensor) -> None:
        pending.wait()
        rows, columns = bank.params[0].shape[-2:]
        moves = directions[: len(bank.params)].to(bank.params[0].dtype) * (lr * self.factor(rows, columns))
        torch._foreach_sub_(bank.params, list(moves.unbind()))
