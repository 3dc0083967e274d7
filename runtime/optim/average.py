"""The exponential moving average of the weights, after Polyak and Juditsky (1992)."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Average:
    """An f32 copy of the masters that moves 1 - `decay` of the way to them in each update.

    It starts at the weights it is made with.
    """

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self._masters = [master.detach() for master in masters.values()]
        self._decay = decay
        self.tensors = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.tensors.values()), self._masters, 1 - self._decay)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights` over the average. They must have the names and shapes of `tensors`."""
        for name, tensor in self.tensors.items():
            tensor.copy_(weights[name])
