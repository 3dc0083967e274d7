"""The interface of a method that adapts a model to the text that it is scored on."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from specc.compiler.strict import Problem, StrictModel


class Adaptation(StrictModel):
    """The base of what `eval.adapt` may be. A subclass names itself by a `kind` Literal and adds its settings.

    `causal` says whether what a token is predicted from depends on the artifact and on earlier tokens alone. Where it
    does not, the number is no score of a model, and `specc eval` never gives it as one. `leaks` says why.

    The programs `features` and `nats`, the two halves of `score`, are made for a spec that has one of these.
    """

    causal: ClassVar[bool]
    leaks: ClassVar[str] = ""

    kind: str

    @property
    def sees(self) -> str:
        """The inputs of a prediction, where the method is causal."""
        return "the artifact and earlier tokens alone"

    def problems_with(self, window: int, stride: int) -> Iterator[Problem]:
        """Why it cannot work in windows of so many tokens, each so many after the one before."""
        yield from ()

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Why it cannot work on a model of parameters of these shapes, by name."""
        yield from ()
