"""SLOT: a vector added to the last hidden states, fitted anew for each few windows; once as published, once causal."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.strict import NonNegativeFloat, Positive, PositiveFloat, Problem


class _Fit(Adaptation):
    """A vector that starts at 0, and `steps` steps of AdamW on the mean loss of the tokens that it is fitted on."""

    lr: PositiveFloat = 0.003
    steps: Positive = 5
    weight_decay: NonNegativeFloat = 1e-8
    eps: PositiveFloat = 1e-5


class Slot(_Fit):
    """SLOT as published (Hu et al. 2025, arXiv 2505.12392; openai/parameter-golf pull request 1105): one vector for
    each `windows` windows in a row, fitted on all their tokens but the last of each, and so on nearly all that it then
    scores. That is why it is not causal."""

    causal: ClassVar[bool] = False
    leaks: ClassVar[str] = "fitted on the tokens that it then scores"

    kind: Literal["slot"]
    windows: Positive = 32


class SlotCausal(_Fit):
    """SLOT with one vector a window, fitted on those tokens alone that earlier windows have scored."""

    causal: ClassVar[bool] = True

    kind: Literal["slot_causal"]

    def problems_with(self, window: int, stride: int) -> Iterator[Problem]:
        """Windows that overlap."""
        if stride >= window:
            message = f"slot_causal fits on what windows share, and windows of {window} that advance by {stride} do not"
            yield Problem((), "S259", message, f"use a stride below {window}")
