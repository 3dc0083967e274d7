"""The input scales of int8 products in quantization-aware training."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specc.runtime.distributed.world import World

SLOT = "rounding.input_scale"  # the key prefix in the optimizer state of a checkpoint


class InputScales:
    """The scales by which training quantizes the inputs of int8 products, f32 [K] each.

    The key of a scale is the name of the leader: the first weight that reads the input.

    The model reads the inverse scales from buffers. The scales are measured once and saved in checkpoints, so that a
    resumed run quantizes with the scales of the original run.

    Args:
        model: the model in training, on its device.
        leaders: for each weight name, the name of the leader of its input.
        measure: a function that maps the weights (f32, by parameter name) to scales, f32 [1] or [K], by leader. Rank 0
            calls this function and sends the scales to all other ranks.
        world: the ranks of the run.

    Attributes:
        measured: whether the scales have been measured or restored. Until then, all scales are 1.
    """

    def __init__(
        self,
        model: nn.Module,
        leaders: Mapping[str, str],
        measure: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        world: World,
    ) -> None:
        self._measure, self._world = measure, world
        self._leader = leaders
        buffers = dict(model.named_buffers())
        self._inverse = {leader: buffers.get(f"{leader}_inverse") for leader in dict.fromkeys(leaders.values())}
        self._scale = {leader: _ones(model.get_parameter(leader)) for leader in self._inverse}
        self._share: dict[str, Tensor] = {}
        self._write(self._scale)

    def measure(self, weights: Mapping[str, Tensor]) -> None:
        def scales() -> dict[str, Tensor]:
            with torch.no_grad():
                return {leader: scale.cpu() for leader, scale in self._measure(weights).items()}

        self._write(self._world.first(scales))

    def state(self) -> dict[str, Tensor]:
        return {f"{SLOT}/{leader}": scale for leader, scale in self._scale.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._write({leader: state[f"{SLOT}/{leader}"] for leader in self._scale})

    def shares(self) -> dict[str, Tensor]:
        """Returns factors f32 [K] for each weight [N, K], by weight name.

        A factor is the scale of an input feature, divided by the largest scale of the input.

        The deployed int8 model rounds the weight after multiplication by these factors.
        """
        return {weight: self._share[leader] for weight, leader in self._leader.items()}

    @torch.no_grad()
    def _write(self, scales: Mapping[str, Tensor]) -> None:
        for leader, inverse in self._inverse.items():
            self._scale[leader].copy_(scales[leader])
            if inverse is not None:
                inverse.copy_(1.0 / self._scale[leader])
            exact = self._scale[leader].double()
            self._share[leader] = (exact / exact.max()).float()
        self.measured = any(bool((scale != 1).any()) for scale in self._scale.values())


def _ones(weight: Tensor) -> Tensor:
    return torch.ones(weight.shape[1], device=weight.device)
