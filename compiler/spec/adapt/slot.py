"""SLOT: a vector that is added to the last hidden states, and fitted for each window or group of windows.

This file has the published method and a causal variant.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.strict import NonNegativeFloat, Positive, PositiveFloat, Problem


class _Fit(Adaptation):
    """A vector that begins at 0 and is fitted by `steps` steps of AdamW on the mean loss of some tokens.

    Attributes:
        lr: the learning rate.
        steps: the steps of AdamW per vector.
        weight_decay: the decoupled weight decay.
        eps: the epsilon of AdamW.
    """

    lr: PositiveFloat = 0.003
    steps: Positive = 5
    weight_decay: NonNegativeFloat = 1e-8
    eps: PositiveFloat = 1e-5


class Slot(_Fit):
    """SLOT as published (Hu et al. 2025, arXiv 2505.12392; openai/parameter-golf pull request 1105).

    A vector is fitted on all tokens of its windows, except the last token of each window. The same tokens are then
    scored, so the method is not causal.

    Attributes:
        windows: the number of consecutive windows that share one vector.
    """

    causal: ClassVar[bool] = False
    leaks: ClassVar[str] = "fitted on the tokens that are then scored"

    kind: Literal["slot"]
    windows: Positive = 32


class SlotCausal(_Fit):
    """SLOT with one vector per window. The vector is fitted only on the tokens of the window that were already scored
    in an earlier window."""

    causal: ClassVar[bool] = True

    kind: Literal["slot_causal"]

    def problems_with(self, window: int, stride: int) -> Iterator[Problem]:
        if stride >= window:
            message = f"`slot_causal` needs windows that overlap, but the window is {window} and the stride {stride}"
            yield Problem((), "S259", message, f"use a stride below {window}")
