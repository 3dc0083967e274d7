"""The spec of an optimizer that only tests have."""

from typing import ClassVar, Literal

from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec


class SignumSpec(OptimizerSpec):
    """Signum (Bernstein et al. 2018, arXiv 1802.04434)."""

    slots: ClassVar[int] = 1

    kind: Literal["signum"]
    momentum: Decay = 0.9

    def refuses(self, shape: tuple[int, ...]) -> str:
        return "" if shape else "signum takes no scalars"
