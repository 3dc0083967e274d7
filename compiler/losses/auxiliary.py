"""A loss that layers of the model state."""

from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.losses.term import LossTerm


class AuxiliaryLoss(LossTerm):
    """A loss that layers state, summed over the blocks. Its gradient is added; logged losses do not include it.

    Attributes:
        name: the layer and the loss, such as `mlp.activation`, the mean square of the output of each layer `mlp`
            (Merity et al. 2017).
    """

    kind: Literal["auxiliary"]
    name: Annotated[str, Field(min_length=1, max_length=200)]

    @property
    def states(self) -> str:
        return self.name
