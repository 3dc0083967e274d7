"""Muon: momentum SGD with orthogonalized updates (Jordan, 2024), batched over all matrices of one shape."""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.muon import MuonSpec
from specc.runtime.distributed.world import Waiting, World
from specc.runtime.optim.bank import Bank, banks_of
from specc.runtime.optim.orthogonalize import METHODS, orthogonalize
from specc.runtime.optim.schedule import Moment, value_at
from specc.runtime.optim.update_rule import UpdateRule

LEAST_ROW = 1e-7  # the lower bound of a row's 2-norm
EPS = 1e-10  # added to NorMuon's mean squares, which are about 1 / columns


class Muon(UpdateRule[MuonSpec]):
    """buf = momentum buf + g; u = g + momentum buf (Nesterov) or buf; p *= 1 - lr weight_decay;
    p -= lr sqrt(max(1, rows / columns)) orthogonalize(u).

    `equalize_rows` first divides each row of u by its 2-norm (MuonEq-R). `second_moment` is the decay v of NorMuon's
    running mean square m of each row of the result o. o is divided by sqrt(v m + (1 - v) mean(o^2)), and then rescaled
    to its previous norm. (Li et al. 2025 instead scale all updates to one RMS, which would change the meaning of lr.)

    Each process sums gradients of, stores the momentum of, and orthogonalizes a part of the matrices of a shape, and
    sends the result to the other processes.
    """

    name = "muon"
    sharded = True

    def __init__(self, spec: MuonSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._method = METHODS[spec.method]
        self.banks = banks_of([*parameters.values()], world)
        self._momentum = [bank.new_state(*bank.params[0].shape) for bank in self.banks]
        rows = [bank.new_state(bank.params[0].shape[0], 1) for bank in self.banks if spec.second_moment is not None]
        self._second_moment = rows

    def numbers(self, now: Moment) -> Sequence[float]:
        spec = self.spec
        return (
            value_at(spec.lr, now) * now.multiplier,
            value_at(spec.momentum, now),
            value_at(spec.weight_decay, now),
        )

    @torch.no_grad()
    def update(self, numbers: Sequence[Tensor]) -> None:
        """Updates the parameters. Sums the gradients of each bank whose `gradient` has not been computed yet."""
        lr, momentum, weight_decay = numbers
        for bank in self.banks:
            if bank.gradient is None:
                bank.add_up().wait()
        pending: list[tuple[Bank, Waiting, Tensor]] = []
        for index, bank in enumerate(self.banks):
            part = self._direction(index, momentum)
            exact_in_bf16 = part.is_cuda and self.spec.second_moment is None
            pending.append((bank, *bank.join(part.bfloat16() if exact_in_bf16 and self.world.size > 1 else part)))
            if len(pending) > 1:  # the previous bank was being sent while this bank was computed
                _apply(*pending.pop(0), lr, weight_decay)
        for last in pending:
            _apply(*last, lr, weight_decay)

    def _direction(self, index: int, momentum: Tensor) -> Tensor:
        """Adds the gradient of a bank to its momentum. Returns the direction to subtract from the local matrices, f32
        [local matrices, rows, columns]."""
        bank, spec = self.banks[index], self.spec
        assert bank.gradient is not None
        buffer, gradient = self._momentum[index][bank.local], bank.gradient
        buffer.mul_(momentum).add_(gradient)
        update = torch.add(gradient, buffer * momentum) if spec.nesterov else buffer
        bank.gradient = None
        if spec.equalize_rows:
            update = update / update.norm(dim=-1, keepdim=True).clamp_(min=LEAST_ROW)
        direction = orthogonalize(update, spec.steps, self._method)
        if spec.second_moment is None:
            return direction
        moment = self._second_moment[index][bank.local]
        moment.lerp_(direction.square().mean(-1, keepdim=True), 1 - spec.second_moment)
        scaled = direction / (moment + EPS).sqrt_()
        # rescaled to the previous norm, so that the learning rate keeps its meaning
        before, after = (tensor.norm(dim=(-2, -1), keepdim=True) for tensor in (direction, scaled))
        same_norm: Tensor = scaled * (before / after.clamp_(min=EPS))
        return same_norm

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        slots = {"momentum": self._momentum}
        if self._second_moment:
            slots["second_moment"] = self._second_moment
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            slot: {
                names[id(param)]: matrix
                for bank, tensor in zip(self.banks, tensors, strict=True)
                for param, matrix in zip(bank.params, tensor, strict=False)  # padding has no parameter
            }
            for slot, tensors in slots.items()
        }


def _apply(bank: Bank, pending: Waiting, directions: Tensor, lr: Tensor, weight_decay: Tensor) -> None:
    """Waits for `directions`, [all matrices, rows, columns], and updates the parameters of a bank."""
    pending.wait()
    rows, columns = bank.params[0].shape
    torch._foreach_mul_(bank.params, 1 - lr * weight_decay)
    moves = directions[: len(bank.params)].float() * (lr * sqrt(max(1, rows / columns)))
    torch._foreach_sub_(bank.params, list(moves.unbind()))
