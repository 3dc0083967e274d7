"""The spec of an optimizer that only tests have."""

from typing import Literal

from specc.compiler.schedule import Rate
from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec


class LionSpec(OptimizerSpec):
    """Lion (Chen et al. 2023, arXiv 2302.06675)."""

    kind: Literal["lion"]
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: Rate = 0.0

    def refuses(self, shape: tuple[int, ...]) -> str:
        return "" if shape else "lion takes no scalars"
