"""The setting `train.start`: weights that a run starts from."""

from typing import Annotated

from pydantic import Field

from specc.compiler.pattern import matches
from specc.compiler.strict import Pattern, StrictModel

Place = Annotated[str, Field(min_length=1, max_length=4096)]


class StartSpec(StrictModel):
    """Weights that replace initial values before the first step.

    Each name that `take` matches and `skip` does not must be in the model, as a parameter, and in the files, as a
    tensor of equal shape. All other parameters have their initial values, and all other tensors are ignored.

    Attributes:
        path: a run, an artifact, a folder of Transformers, a file `*.safetensors`, or a folder of such files.
        take: patterns of names to take.
        skip: patterns of names to leave out.
    """

    path: Place
    take: Annotated[tuple[Pattern, ...], Field(min_length=1)] = ("*",)
    skip: tuple[Pattern, ...] = ()

    def takes(self, name: str) -> bool:
        """Returns whether the patterns select a name."""
        return any(matches(pattern, name) for pattern in self.take) and not any(
            matches(pattern, name) for pattern in self.skip
        )
