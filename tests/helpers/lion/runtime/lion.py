"""The update rule of an optimizer that only tests have."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.lion import LionSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.schedule import Moment, value_at
from specc.runtime.optim.update_rule import UpdateRule


class Lion(UpdateRule[LionSpec]):
    """p *= 1 - lr weight_decay; p -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g."""

    name = "lion"

    def __init__(self, spec: LionSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    def numbers(self, now: Moment) -> Sequence[float]:
        return value_at(self.spec.lr, now) * now.multiplier, value_at(self.spec.weight_decay, now)

    @torch.no_grad()
    def update(self, numbers: Sequence[Tensor]) -> None:
        lr, decay = numbers
        first, second = self.spec.betas
        for name, parameter in self.parameters.items():
            momentum = self._momentum[name]
            direction = momentum.lerp(parameter.grad, 1 - first).sign_()
            parameter.mul_(1 - lr * decay).sub_(direction * lr)
            momentum.lerp_(parameter.grad, 1 - second)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"momentum": self._momentum}
