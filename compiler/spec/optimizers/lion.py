"""Settings of Lion."""

from typing import ClassVar, Literal

from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec


class LionSpec(OptimizerSpec):
    """Lion (Chen et al. 2023, arXiv 2302.06675). Each number moves by the learning rate, against the sign of a
    weighted mean of momentum and gradient. The learning rate is usually 3 to 10 times smaller than with AdamW. The
    weight decay is larger by the same factor.

    Attributes:
        betas: the weight of the momentum in the direction, and the decay of the momentum.
    """

    slots: ClassVar[int] = 1

    kind: Literal["lion"]
    betas: tuple[Decay, Decay] = (0.9, 0.99)
