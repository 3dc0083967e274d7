"""The update rule of an optimizer that only tests have."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.signum import SignumSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.update_rule import UpdateRule


class Signum(UpdateRule[SignumSpec]):
    """m = b m + (1 - b) g; p -= lr sign(m)."""

    name = "signum"

    def __init__(self, spec: SignumSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._momentum = self.new_slot()

    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        (lr,) = numbers
        torch._foreach_lerp_(self._momentum, self.gradients(), 1 - self.spec.momentum)
        for parameter, momentum in zip(self.tensors, self._momentum, strict=True):
            parameter.sub_(lr * momentum.sign())

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"momentum": self.by_name(self._momentum)}
