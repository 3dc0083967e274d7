"""The z-loss of PaLM."""

from typing import Literal

from specc.compiler.losses.term import LossTerm


class ZLoss(LossTerm):
    """The mean square of log(sum(exp(logits))). This loss keeps logits near 0 (Chowdhery et al. 2022, section 5)."""

    kind: Literal["z"]

    @property
    def per_token(self) -> str:
        return "lse ** 2"
