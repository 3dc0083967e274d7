"""A stack of blocks as one stage of an encoder or a decoder."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.architectures.blocks import Blocks
from specc.compiler.architectures.stack import Stack
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Part, Trait
from specc.compiler.ir.builder import Builder
from specc.compiler.strict import PartName


def norm_name(title: str) -> str:
    """Returns the name of the norm after a stage of blocks. `title` is the title of the stage."""
    return "norm" if title == "blocks" else f"{title}_norm"


class BlocksStage(Blocks, Part):
    """Blocks as a stage of an encoder or a decoder. In all formulas of the stage, `layers` is the number of blocks of
    this stage. A final norm follows the last block, unless the blocks normalize the stream after each layer. The final
    norm belongs to no layer, so the norm has no `scale` that depends on the layer.

    Attributes:
        name: the name of the stage in paths of nodes and parameters. By default, the kind of the stage.
    """

    kind: Literal["blocks"]
    name: PartName | None = None

    @property
    def prefix(self) -> str:
        return f"{self.title}_"

    @property
    def traits(self) -> frozenset[Trait]:
        return super().traits | {"functions"}

    @property
    def blocks(self) -> int:
        return self.count

    @property
    def further_modules(self) -> Mapping[str, str]:
        return {norm_name(self.title): f"the norm after {self.title}"}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        assert context.site is not None
        return Stack(self, shape, context.site).begin(b, context)

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        assert context.site is not None
        value, state = Stack(self, shape, context.site).run(b, x, context)
        side, _, title = b.scope.rpartition(".")
        b.scope = f"{side}.{norm_name(title)}"
        if self.norm is None or "stream" in self.norm.places:
            return Lowered(value, state)
        return Lowered(self.norm.of_no_layer.lower(b, value, "y", shape), state)
