"""Settings of AdamW."""

from typing import Literal

from specc.compiler.schedule import Rate
from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.strict import PositiveFloat


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov and Hutter, 2019).

    Attributes:
        betas: the decays of the first and second moments.
        eps: the epsilon of the denominator.
        weight_decay: the decoupled weight decay: a number, a formula in `t`, or a schedule.
    """

    kind: Literal["adamw"]
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Rate = 0.0
