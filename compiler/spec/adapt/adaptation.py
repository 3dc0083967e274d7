"""The base class of methods that adapt a model to the text on which it is evaluated."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from specc.compiler.strict import Problem, StrictModel


class Adaptation(StrictModel):
    """The base class of `eval.adapt`. A subclass has a `kind` Literal as its tag and adds its settings.

    A spec with an adaptation has the programs `features`, which returns the last hidden states, and `nats`, which
    returns the loss of each token. Together they compute `score`.

    Attributes:
        causal: whether each prediction depends only on the artifact and on earlier tokens. If not, the result is
            not a valid score, and `specc eval` never reports it as a score.
        leaks: the reason why the method is not causal.
    """

    causal: ClassVar[bool]
    leaks: ClassVar[str] = ""

    kind: str

    @property
    def sees(self) -> str:
        """Describes the inputs on which a prediction depends, if the method is causal."""
        return "the artifact and earlier tokens alone"

    def problems_with(self, window: int, stride: int) -> Iterator[Problem]:
        """Yields the reasons why the method cannot run on windows of `window` tokens that advance by `stride`."""
        yield from ()

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Yields the reasons why the method cannot run on a model whose parameters have these shapes."""
        yield from ()
