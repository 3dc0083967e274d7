"""The spec of an optimizer that only tests have."""

from typing import Literal

from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.spec.optimizers.schedules import Taper
from specc.compiler.strict import NonNegativeFloat


class LionSpec(OptimizerSpec):
    """Lion (Chen et al. 2023, arXiv 2302.06675)."""

    kind: Literal["lion"]
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: NonNegativeFloat | Taper = 0.0

    def refuses(self, shape: tuple[int, ...]) -> str:
        return "" if shape else "lion takes no scalars"
