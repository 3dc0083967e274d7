"""The input scales of int8 products during quantization-aware training."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specc.runtime.distributed.world import World

SLOT = "rounding.input_scale"  # the key prefix in the optimizer state of a checkpoint


class InputScales:
    """The scales of the inputs of int8 products, f32 [K] each, by leader: the first weight that reads the input.

    If the programs of the model round these inputs, they read the inverse scales from buffers of the model. Scales are
    measured once and saved in checkpoints. A resumed run therefore rounds with the same scales.

    Args:
        model: the model that trains, on its device.
        leaders: the leader of each weight, by weight name.
        measure: a function that returns the scales, f32 [1] or [K] by leader, for weights (f32, by parameter name).
            Only rank 0 calls it, so that all ranks have the same scales.
        world: the ranks of the run.

    Attributes:
        measured: False while all scales are 1, their value before `measure`.
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
        """Measures the scales for `weights` (f32, by parameter name) on rank 0 and sets them on all ranks."""

        def scales() -> dict[str, Tensor]:
            with torch.no_grad():
                return {leader: scale.cpu() for leader, scale in self._measure(weights).items()}

        self._write(self._world.first(scales))

    def state(self) -> dict[str, Tensor]:
        """Returns the scales for a checkpoint; ones if they have not been measured."""
        return {f"{SLOT}/{leader}": scale for leader, scale in self._scale.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Sets the scales from the result of `state`."""
        self._write({leader: state[f"{SLOT}/{leader}"] for leader in self._scale})

    def shares(self) -> dict[str, Tensor]:
        """Returns f32 [K] for each weight [N, K], by weight name: the scales of its input features, divided by the
        largest of these scales.

        The deployed model rounds the weight multiplied by these shares.
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
