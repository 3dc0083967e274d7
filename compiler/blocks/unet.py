"""Long skip connections from the first half of the blocks to the second half."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.init import constant
from specc.compiler.blocks.parts import Skips
from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.strict import later


class Unet(Skips):
    """U-Net skip connections (after Ronneberger et al., 2015): with h = L // 2 of L blocks, block h + i reads the
    output of block h - 1 - i, times a learned number per feature, from 1. If L is odd, the last block has no skip.

    Attributes:
        gated: if false, the scaled output is added to the stream x. If true, the result is g x + (1 - g) skip, for the
            sigmoid g of a learned number per feature, from 0.
    """

    kind: Literal["unet"]
    gated: bool = later(False)

    def sources(self, layers: int) -> Mapping[int, int]:
        half = layers // 2
        return {half + i: half - 1 - i for i in range(half)}

    def lower(self, b: Builder, x: str, skip: str, shape: Shape) -> str:
        features = TensorType((shape.dim,), shape.dtype)
        scale = b.param("scale", features, constant(1.0))
        if not self.gated:
            return b.add("x", Pointwise(("x + scale * skip",), ("x", "skip", "scale")), (x, skip, scale))
        scaled = b.add("scaled", Pointwise(("scale * skip",), ("skip", "scale")), (skip, scale))
        share = b.param("share", features, constant(0.0))
        mixed = Pointwise(("skip + sigmoid(share) * (x - skip)",), ("x", "skip", "share"))
        return b.add("x", mixed, (x, scaled, share))
