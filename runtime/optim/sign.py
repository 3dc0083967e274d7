"""signSGD: every element moves by the learning rate, against the sign of the gradient."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.spec.optimizers.sign import SignSpec
from specc.runtime.optim.update_rule import UpdateRule


class Sign(UpdateRule[SignSpec]):
    """signSGD (Bernstein et al. 2018): `p -= lr * sign(g)`."""

    name = "sign"

    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        (lr,) = numbers
        directions = torch._foreach_sign(self.gradients())
        torch._foreach_mul_(directions, lr)
        torch._foreach_sub_(self.tensors, directions)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {}
