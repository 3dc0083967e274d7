"""A stack of blocks as one stage of an encoder or a decoder."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.architectures.blocks import Blocks
from specc.compiler.architectures.stack import Stack
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Stage
from specc.compiler.ir.graph import Builder


def norm_name(title: str) -> str:
    """Returns the name of the norm after a stage of blocks, which is in the same scope as the stage."""
    return "norm" if title == "blocks" else f"{title}_norm"


class BlocksStage(Blocks, Stage):
    """Blocks as a stage of an encoder or a decoder. Their norm also follows the last block, without a `scale` that
    depends on the layer, because it is in no layer."""

    kind: Literal["blocks"]

    @property
    def reads_source(self) -> bool:
        return any(layer.reads_source for _, _, layer in self.all_layers)

    @property
    def in_place(self) -> bool:
        return any(layer.in_place for _, _, layer in self.all_layers)

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        assert context.site is not None
        return Stack(self, shape, context.site).begin(b, context)

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        assert context.site is not None
        value, state = Stack(self, shape, context.site).run(b, x, context)
        side, _, title = b.scope.rpartition(".")
        b.scope = f"{side}.{norm_name(title)}"
        return Lowered(self.norm.of_no_layer.lower(b, value, "y", shape), state)
