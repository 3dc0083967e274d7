"""The setting `train.start`: weights with which a run starts."""

from typing import Annotated

from pydantic import Field

from specc.compiler.pattern import matches
from specc.compiler.strict import Pattern, StrictModel

Place = Annotated[str, Field(min_length=1, max_length=4096)]


class StartSpec(StrictModel):
    """Weights that replace initial values before the first step.

    A name is selected if a pattern in `take` matches the name, and no pattern in `skip` matches the name. Each selected
    name must be a parameter of the model. The files must have a tensor of this name and shape. All other parameters
    keep their initial values, and all other tensors are ignored.

    Attributes:
        path: a run, an artifact, a folder of Transformers, a file `*.safetensors`, or a folder of such files.
        take: patterns of the names to load.
        skip: patterns of the names to leave out.
    """

    path: Place
    take: Annotated[tuple[Pattern, ...], Field(min_length=1)] = ("*",)
    skip: tuple[Pattern, ...] = ()

    def takes(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self.take) and not any(
            matches(pattern, name) for pattern in self.skip
        )
