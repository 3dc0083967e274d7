"""The cross-entropy of the next token."""

from typing import Literal

from specc.compiler.changing_values import Weight
from specc.compiler.losses.term import LossTerm


class NextToken(LossTerm):
    """The mean cross-entropy of the next token, in nats."""

    kind: Literal["next_token"]
    weight: Weight = 1.0

    @property
    def per_token(self) -> str:
        return "nats"

    @property
    def input(self) -> str:
        return "" if self.weight == 1 else super().input
