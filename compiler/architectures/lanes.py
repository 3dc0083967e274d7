"""Two residual lanes, one per layer of a block: usually one for attention and one for the feed-forward layer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.init import constant
from specc.compiler.blocks.parts import Layer
from specc.compiler.ir.graph import Builder, output_refs
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.sequence import Concat
from specc.compiler.ops.shape import Halves
from specc.compiler.strict import PositiveFloat, Problem, StrictModel


class Lanes(StrictModel):
    """Two residual lanes, one for each of a block's two layers.

    Both lanes start as the output of the previous block. With f_j for layer j after its norm, lane i becomes

        carry_i lane_i + to_0i f_0(lane_0) + to_1i f_1(lane_1)

    so neither layer reads what the other writes in the same block. All factors are learned numbers; each to_ji starts
    at 1. Skips and mixes apply to the first lane: a skip is added to it, but the result of a mix is only the input of
    its layer. The last block returns the mean of the lanes. The lanes are concatenated in one tensor.

    Attributes:
        first: the first block with lanes, counted from 0.
        carry: the initial value of each carry_i.
    """

    first: Annotated[int, Field(ge=1, lt=1000)]
    carry: PositiveFloat = 1.1

    def problems_in(
        self, layers: Sequence[Layer], order: Sequence[int], parallel: Sequence[int], sources: Mapping[int, int]
    ) -> Iterator[Problem]:
        """Yields the problems of these lanes in blocks that run in this `order`.

        Args:
            layers: the layers of a block.
            order: the block of each run.
            parallel: the indices of parallel blocks.
            sources: the run that each skip reads, by the run that reads it.
        """
        if self.first not in order:
            hint = f"the last one is {max(order)}: blocks are counted from 0"
            yield Problem(("first",), "S246", f"lanes begin at block {self.first} of {max(order) + 1}", hint)
            return
        if len(layers) != 2:
            message = f"a lane for each of two layers, and a block has {len(layers)}"
            yield Problem((), "S246", message, "use one attention and one mlp, or leave lanes out")
        if any(order.count(i) > 1 for i in range(self.first - 1, max(order) + 1)):
            message = f"lanes begin behind block {self.first - 1}, and it or a later one runs more than once"
            yield Problem(("first",), "S247", message, "let the lanes begin two blocks behind the loop, or later")
        if both := [i for i in parallel if i >= self.first]:
            message = f"block {both[0]} has lanes and is parallel"
            hint = "take it out of `parallel`: in lanes the layers run beside each other"
            yield Problem(("first",), "S247", message, hint)
        if late := [run for run in sources.values() if order[run] >= self.first - 1]:
            message = f"the output of block {order[late[0]]}, where the lanes begin, is one that a skip reads"
            yield Problem(("first",), "S247", message, "let the lanes begin later")

    def split(self, b: Builder, x: str, layers: Sequence[Layer]) -> Sequence[str]:
        """Adds the two lanes [B, T, D] of x [B, T, 2 D] and returns them."""
        first, second = (f"{layer.title}_lane" for layer in layers)
        return output_refs(b.add("lanes.split", Halves((first, second)), (x,)), 2)

    def join(self, b: Builder, lanes: Sequence[str]) -> str:
        """Adds the concatenation of the lanes, [B, T, 2 D], and returns it."""
        return b.add("lanes.joined", Concat(), lanes)

    def written(
        self, b: Builder, lanes: Sequence[str], branches: Sequence[str], layers: Sequence[Layer], shape: Shape
    ) -> Sequence[str]:
        """Adds the lanes after a block and returns them.

        Args:
            b: the builder of the block's function.
            lanes: the lanes before the block, [B, T, D] each.
            branches: the outputs of the block's layers, [B, T, D] each.
            layers: the layers of the block.
            shape: the shape dims of the model.
        """
        made = []
        for i, layer in enumerate(layers):
            b.scope = layer.title
            carry = b.param("carry", shape.activation(1), constant(self.carry))
            factors = []
            for other in layers:
                b.scope = other.title
                factors.append(b.param(f"to_{layer.title}", shape.activation(1), constant(1.0)))
            b.scope = layer.title
            first = Pointwise(("carry * lane + to * branch",), ("lane", "carry", "branch", "to"))
            carried = b.add("carried", first, (lanes[i], carry, branches[0], factors[0]))
            second = Pointwise(("lane + to * branch",), ("lane", "branch", "to"))
            made.append(b.add("lane", second, (carried, branches[1], factors[1])))
        return made

    def mean(self, b: Builder, lanes: Sequence[str]) -> str:
        """Adds the mean of the lanes, which is the output of the last block, and returns it."""
        return b.add("lanes.mean", Pointwise(("0.5 * (first + second)",), ("first", "second")), lanes)
