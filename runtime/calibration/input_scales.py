"""What training for int8 products rounds by beside the weights' own grids: the scales of the products' inputs."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specc.runtime.distributed.world import World

SLOT = "rounding.input_scale"  # of a checkpoint's optimizer state


class InputScales:
    """The scales of the inputs of int8 products, f32 [K] each, by the first of the weights that share the input. Where
    the model's programs round these inputs they read the inverses from its buffers, on its device already.

    They stay as they were measured once, so a run that goes on from a checkpoint rounds as the one before it.

    Args:
        leaders: the first weight that reads its input, by weight.
        measure: the scales for given weights (f32, by parameter name), f32 [1] or [K]. Only rank 0 calls it, so they
            are the same on any number of ranks.

    Attributes:
        measured: whether they are; before, all are 1.
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
        """Takes the scales that fit `weights` from now on."""

        def found() -> dict[str, Tensor]:
            with torch.no_grad():
                return {leader: scale.cpu() for leader, scale in self._measure(weights).items()}

        self._write(self._world.first(found))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; ones before they were measured."""
        return {f"{SLOT}/{leader}": scale for leader, scale in self._scale.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with what `state` gave."""
        self._write({leader: state[f"{SLOT}/{leader}"] for leader in self._scale})

    def shares(self) -> dict[str, Tensor]:
        """Of each weight [N, K], the scales of its input as shares of the largest, f32 [K]: the deployed model rounds
        the weight times them."""
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
    """f32 [K], on the device of a weight [N, K]."""
    return torch.ones(weight.shape[1], device=weight.device)
