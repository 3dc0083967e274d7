"""The loss term `auxiliary`: a loss that a layer computes, such as the load balance of experts.

A layer lists the names of its losses in `Part.losses` (compiler/blocks/parts.py), and returns their values in
`Lowered.losses`.
"""

from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.losses.term import LossTerm


class AuxiliaryLoss(LossTerm):
    """An auxiliary loss of layers, summed over the blocks. The loss contributes to gradients, but not to the logged
    loss.

    Attributes:
        name: the layer and the loss. For example, `mlp.activation` is the mean square of the output of each layer `mlp`
            (Merity et al. 2017).
    """

    kind: Literal["auxiliary"]
    name: Annotated[str, Field(min_length=1, max_length=200)]

    @property
    def states(self) -> str:
        return self.name
