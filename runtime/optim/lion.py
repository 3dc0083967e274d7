"""Lion: every element moves by the learning rate, against the sign of a weighted mean of momentum and gradient."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.lion import LionSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.update_rule import UpdateRule


class Lion(UpdateRule[LionSpec]):
    """Lion (Chen et al. 2023, arXiv 2302.06675): `p -= lr * sign(b1 * m + (1 - b1) * g)`, then
    `m = b2 * m + (1 - b2) * g`.
    """

    name = "lion"

    def __init__(self, spec: LionSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._momentum = self.new_slot()

    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        (lr,), gradients = numbers, self.gradients()
        in_direction, in_momentum = self.spec.betas
        directions = torch._foreach_lerp(self._momentum, gradients, 1 - in_direction)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, lr)
        torch._foreach_sub_(self.tensors, directions)
        torch._foreach_lerp_(self._momentum, gradients, 1 - in_momentum)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"momentum": self.by_name(self._momentum)}
