"""What a model in training rounds beside its weights: the inputs of products that will be computed in int8."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specc.runtime.distributed import World

SLOT = "rounding.input_scale"  # of a checkpoint's optimizer state


class InputScales:
    """The scales of the inputs that a model's programs round, f32 [K] each, by the first of the weights that share the
    input. The model reads their inverses from its buffers; they must lie on its device already.

    They stay as they were measured once, so a run that goes on from a checkpoint rounds as the one before it.

    Args:
        leaders: the first weight that reads its input, by weight.
        measure: the scales for given weights (f32, by parameter name), f32 [1] or [K]. Only rank 0 calls it, so they
            are the same on any number of ranks.
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
        self._inverse = {leader: buffers[f"{leader}_inverse"] for leader in dict.fromkeys(self._leader.values())}
        self._scale = {leader: torch.ones_like(inverse) for leader, inverse in self._inverse.items()}
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
            inverse.copy_(1.0 / self._scale[leader])
            exact = self._scale[leader].double()
            self._share[leader] = (exact / exact.max()).float()
