"""Settings of AdamW."""

from typing import ClassVar, Literal

from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.strict import PositiveFloat


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov and Hutter, 2019).

    Attributes:
        betas: the decays of the first and second moments.
        eps: the epsilon of the denominator.
    """

    slots: ClassVar[int] = 2
    temporaries: ClassVar[float] = 0  # one kernel updates in place

    kind: Literal["adamw"]
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8

    def state_numbers(self, shape: tuple[int, ...]) -> int:
        return super().state_numbers(shape) + 1  # the number of steps so far
