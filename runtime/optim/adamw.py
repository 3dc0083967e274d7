"""AdamW, as implemented by Torch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.adamw import AdamWSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.update_rule import UpdateRule


class AdamW(UpdateRule[AdamWSpec]):
    """AdamW (Loshchilov and Hutter, 2019), fused on a GPU."""

    name = "adamw"

    def __init__(self, spec: AdamWSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        fused = self.tensors[0].is_cuda
        # Torch's kernel fixes the weight decay at its launch, and a CUDA graph cannot change a launch. If the weight
        # decay changes during the run, it is therefore applied separately.
        decay = spec.weight_decay if isinstance(spec.weight_decay, float | int) and not spec.cautious_decay else None
        self._decays = decay is None
        self._torch = torch.optim.AdamW(
            self.tensors, 0.0, spec.betas, spec.eps, decay or 0.0, fused=fused, foreach=False, capturable=fused
        )
        self._torch._warned_capturable_if_run_uncaptured = True  # suppresses a warning about steps outside graphs
        # Torch creates its state in the first step, but checkpoints need the names of the state tensors earlier
        for parameter in self.tensors:
            self._torch.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def decay(self, share: Tensor) -> None:
        if self._decays:
            super().decay(share)

    def update(self, work: str, numbers: Sequence[Tensor]) -> None:
        (self._torch.param_groups[0]["lr"],) = numbers
        self._torch.step()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        slots = [self._torch.state[parameter] for parameter in self.tensors]
        return {slot: self.by_name([each[slot] for each in slots]) for slot in ("step", "exp_avg", "exp_avg_sq")}
