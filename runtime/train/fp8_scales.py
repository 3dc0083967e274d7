"""The scales of matrix products in 8-bit floats, for the setting `train.precision.fp8`.

The scales are computed from the magnitudes of operands in earlier steps.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specc.compiler.ops.fp8 import FACTORS, HISTORY, LARGEST, MOST, SCALES, USUAL, begin_scales, delayed_scale
from specc.compiler.passes.fp8_products import SUFFIX
from specc.runtime.distributed.world import World

SLOT = "fp8.largest"  # the key prefix in the state of a checkpoint
X, WEIGHT, DY = range(len(FACTORS))


class Fp8Scales:
    """Computes the scales of matrix products from the largest magnitudes of their operands in earlier steps.

    A matrix product reads its scales from a buffer of the model, and records the magnitudes of its operands in the same
    buffer; see `specc.compiler.ops.fp8`. The first step has no recorded magnitudes. Its scales depend on the weights,
    and on estimates for the inputs and the gradients.

    Args:
        model: the model in training, on its device.
        rows: the number of tokens per backward pass on this process.
        world: the processes that train together. All processes have the same scales.
        loss_scale: the factor by which the loss is multiplied in the first step.
    """

    def __init__(self, model: nn.Module, rows: int, world: World, loss_scale: float = 1.0) -> None:
        self._world, self._rows = world, rows
        self._buffers = {
            name.removesuffix(SUFFIX): buffer for name, buffer in model.named_buffers() if name.endswith(SUFFIX)
        }
        self._weights = {name: model.get_parameter(name) for name in self._buffers}
        self._most = torch.tensor(MOST, device=world.device)
        self.begin(loss_scale)

    @torch.no_grad()
    def begin(self, loss_scale: float) -> None:
        """Sets the scales of the first step. `loss_scale` is the factor by which the loss is multiplied in
        this step.
        """
        for name, buffer in self._buffers.items():
            begin_scales(buffer)
            buffer[HISTORY:, WEIGHT] = self._weights[name].detach().abs().amax().float()
            buffer[HISTORY:, DY] = USUAL[X] / self._rows
        self._write(loss_scale)

    @torch.no_grad()
    def update(self, loss_scale: float) -> None:
        """Records the largest magnitudes of the last step, and sets the scales of the next step.

        `loss_scale` is the factor by which the loss is multiplied in the next step. A magnitude that is not finite, for
        example after an overflow, is replaced by the largest recorded magnitude.
        """
        if not self._buffers:
            return
        seen = torch.stack([buffer[LARGEST] for buffer in self._buffers.values()])  # [P, 3]
        self._world.largest(seen)
        seen[:, DY] /= self._loss_scale
        for buffer, new in zip(self._buffers.values(), seen, strict=True):
            history = buffer[HISTORY:]
            new = torch.where(new.isfinite(), new, history.amax(0))
            history.copy_(torch.cat((history[1:], new[None])))
        self._write(loss_scale)

    def _write(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        for buffer in self._buffers.values():
            largest = buffer[HISTORY:].amax(0)
            largest[DY] *= loss_scale
            buffer[SCALES] = delayed_scale(largest, self._most)
            buffer[LARGEST] = 0.0

    def state(self) -> dict[str, Tensor]:
        """Returns the recorded magnitudes by name, for a checkpoint. The tensors, f32 [steps, 3], are not copies."""
        return {f"{SLOT}/{name}": buffer[HISTORY:] for name, buffer in self._buffers.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], loss_scale: float) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self._write(loss_scale)
