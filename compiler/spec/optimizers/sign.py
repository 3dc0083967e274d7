"""Settings of signSGD."""

from typing import ClassVar, Literal

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec


class SignSpec(OptimizerSpec):
    """signSGD (Bernstein et al. 2018). Each number moves by the learning rate, against the sign of its gradient.

    This is the update rule for the bias of a router (Wang et al. 2024, arXiv 2408.15664).
    """

    in_norm: ClassVar[bool] = False

    kind: Literal["sign"]
