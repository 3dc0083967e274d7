"""Loss scaling: multiplies the loss by a factor before the backward pass (`train.precision.loss_scale`)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.compiler.spec.precision import LossScaleSpec

LARGEST = 2.0**32  # the largest factor, because the scaled loss must stay far below the largest f32


class LossScale:
    """The factor by which the loss is multiplied before the backward pass.

    Gradients are divided by the factor before clipping. A dynamic factor decreases after a step with a gradient that is
    not finite, and increases after many steps with finite gradients (Micikevicius et al., 2018). All processes have the
    same factor.

    Args:
        spec: the settings, or a constant factor.
        device: the device of `factor`.

    Attributes:
        factor: the factor on the device, f32 []. CUDA graphs read it.
    """

    def __init__(self, spec: LossScaleSpec | float, device: torch.device) -> None:
        self._spec = spec if isinstance(spec, LossScaleSpec) else None
        first = spec.initial if isinstance(spec, LossScaleSpec) else spec
        self._value = torch.tensor(first, dtype=torch.float64)
        self._finite = torch.zeros((), dtype=torch.int64)  # the number of consecutive steps with finite gradients
        self._skipped = torch.zeros((), dtype=torch.int64)
        self.factor = torch.tensor(first, dtype=torch.float32, device=device)

    @property
    def value(self) -> float:
        return float(self._value)

    @property
    def changes(self) -> bool:
        """Whether the factor is dynamic. If the factor is constant, a gradient that is not finite ends the run."""
        return self._spec is not None

    @property
    def skipped(self) -> int:
        return int(self._skipped)

    @torch.no_grad()
    def skips(self, finite: bool) -> bool:
        """Adjusts the factor after the backward passes of a step. Returns whether the update must be skipped.

        Args:
            finite: whether the loss and all gradients of the step are finite.
        """
        if (spec := self._spec) is None:
            return False
        if finite:
            self._finite += 1
            if int(self._finite) == spec.every:
                self._set(min(self.value * spec.growth, max(LARGEST, self.value)))
            return False
        if self.value <= spec.least:
            return False
        self._skipped += 1
        self._set(max(self.value * spec.backoff, spec.least))
        return True

    def _set(self, value: float) -> None:
        self._value.fill_(value)
        self._finite.zero_()
        self.factor.fill_(value)

    def state(self) -> dict[str, Tensor]:
        if self._spec is None:
            return {}
        names = ("value", "finite", "skipped")
        return {f"loss_scale.{name}": getattr(self, f"_{name}") for name in names}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.factor.fill_(self.value)
