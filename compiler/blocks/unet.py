"""Long skips from the first half of the blocks to the second."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.blocks.init import constant
from specc.compiler.blocks.roles import Shape, Skips
from specc.compiler.ir import Builder, TensorType
from specc.compiler.ops.pointwise import Pointwise


class Unet(Skips):
    """Of L blocks, block h + i adds the output of block h - 1 - i for h = L // 2, scaled by a learned number a feature
    from 1 (after Ronneberger et al., 2015). With odd L the last block has no partner."""

    kind: Literal["unet"]

    def sources(self, layers: int) -> Mapping[int, int]:
        half = layers // 2
        return {half + i: half - 1 - i for i in range(half)}

    def lower(self, b: Builder, x: str, skip: str, shape: Shape) -> str:
        scale = b.param("scale", TensorType((shape.dim,), shape.dtype), constant(1.0))
        return b.add("x", Pointwise(("x + scale * skip",), ("x", "skip", "scale")), (x, skip, scale))
