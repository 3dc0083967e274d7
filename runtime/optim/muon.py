"""Muon: momentum SGD with orthogonalized updates (Jordan, 2024), batched over all matrices of one shape."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.muon import MuonSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.matrix_rule import MatrixRule
from specc.runtime.optim.orthogonalize import METHODS, orthogonalize

LEAST_ROW = 1e-7  # the lower bound for the 2-norm of a row
EPS = 1e-10  # added to NorMuon's mean squares, which are about 1 / columns


class Muon(MatrixRule[MuonSpec]):
    """Muon. First, `buf = momentum * buf + g`. Then, `u = g + momentum * buf` (Nesterov) or `u = buf`. Finally,
    `p -= lr * sqrt(max(1, rows / columns)) * orthogonalize(u)`.

    The setting `equalize_rows` divides each row of `u` by its 2-norm before the orthogonalization (MuonEq-R). The
    setting `second_moment` divides each row of the orthogonalized update by the root of its running mean square
    (NorMuon). The norm of the whole update does not change.
    """

    name = "muon"
    scheduled = ("momentum",)

    def __init__(self, spec: MuonSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._method = METHODS[spec.method]
        if spec.coefficients is not None:
            self._method = replace(self._method, quintics=spec.coefficients)
        self._momentum = self.new_slot()
        rows = [bank.new_state(*bank.params[0].shape[:-1], 1) for bank in self.banks if spec.second_moment is not None]
        self._second_moment = rows

    def factor(self, rows: int, columns: int) -> float:
        return sqrt(max(1, rows / columns))

    def exact_in_bf16(self, direction: Tensor) -> bool:
        return direction.is_cuda and self.spec.second_moment is None

    def direction(self, index: int, gradient: Tensor, work: str, numbers: Sequence[Tensor]) -> Tensor:
        (momentum,), spec, local = numbers, self.spec, self.banks[index].local
        buffer = self._momentum[index][local]
        buffer.mul_(momentum).add_(gradient)
        update = torch.add(gradient, buffer * momentum) if spec.nesterov else buffer
        if spec.equalize_rows:
            update = update / update.norm(dim=-1, keepdim=True).clamp_(min=LEAST_ROW)
        direction = orthogonalize(update, spec.steps, self._method)
        if spec.second_moment is None:
            return direction
        moment = self._second_moment[index][local]
        moment.lerp_(direction.square().mean(-1, keepdim=True), 1 - spec.second_moment)
        scaled = direction / (moment + EPS).sqrt_()
        # Without the previous norm, the same learning rate would cause updates of another size.
        before, after = (tensor.norm(dim=(-2, -1), keepdim=True) for tensor in (direction, scaled))
        same_norm: Tensor = scaled * (before / after.clamp_(min=EPS))
        return same_norm

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        slots = {"momentum": self._momentum, **({"second_moment": self._second_moment} if self._second_moment else {})}
        return {slot: self.by_name(tensors) for slot, tensors in slots.items()}
