"""AdamW, as implemented by Torch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.adamw import AdamWSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.schedule import Moment, value_at
from specc.runtime.optim.update_rule import UpdateRule


class AdamW(UpdateRule[AdamWSpec]):
    """AdamW (Loshchilov and Hutter, 2019), fused on a GPU."""

    name = "adamw"

    def __init__(self, spec: AdamWSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._tensors: list[Tensor] = list(parameters.values())
        fused = self._tensors[0].is_cuda
        # Torch passes its weight decay as a launch constant, which a CUDA graph cannot change: `update` applies others.
        decay = spec.weight_decay if isinstance(spec.weight_decay, float | int) else 0.0
        self._torch = torch.optim.AdamW(
            self._tensors, 0.0, spec.betas, spec.eps, decay, fused=fused, foreach=False, capturable=fused
        )
        self._torch._warned_capturable_if_run_uncaptured = True  # silences a warning: capture is optional here
        # Torch creates its state in the first step, but the state names must exist before it.
        for parameter in self._tensors:
            self._torch.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def numbers(self, now: Moment) -> Sequence[float]:
        return value_at(self.spec.lr, now) * now.multiplier, value_at(self.spec.weight_decay, now)

    @torch.no_grad()
    def update(self, numbers: Sequence[Tensor]) -> None:
        lr, decay = numbers
        if not isinstance(self.spec.weight_decay, float | int):
            torch._foreach_mul_(self._tensors, 1 - lr * decay)
        self._torch.param_groups[0]["lr"] = lr
        self._torch.step()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        slots = self._torch.state
        return {
            slot: {name: slots[parameter][slot] for name, parameter in self.parameters.items()}
            for slot in ("step", "exp_avg", "exp_avg_sq")
        }
