"""The base class of methods that adapt a model to the text on which it is evaluated."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from specc.compiler.strict import Problem, StrictModel


class Adaptation(StrictModel):
    """The base class of `eval.adapt`. A subclass has a `kind` Literal as its tag and adds its settings.

    A spec with an adaptation has two additional programs. `features` returns the last hidden states, and `nats` returns
    the loss of each token. Together, the two programs compute `score`.

    Attributes:
        causal: whether each prediction depends only on the artifact and on earlier tokens. If not, `specc eval` does
            not report the result as a score.
        leaks: the reason why the method is not causal.
    """

    causal: ClassVar[bool]
    leaks: ClassVar[str] = ""

    kind: str

    @property
    def sees(self) -> str:
        """Describes the inputs of a prediction, if the method is causal."""
        return "the artifact and earlier tokens alone"

    def problems_with(self, window: int, stride: int) -> Iterator[Problem]:
        """Yields the reasons why the method cannot run on windows of `window` tokens with the given stride."""
        yield from ()

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Yields the reasons why the method cannot run on a model whose parameters have these shapes."""
        yield from ()
