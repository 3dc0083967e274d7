"""What leads from the encoder's last state to the decoder's first."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.parts import Bridge
from specc.compiler.ir.graph import Builder, TypeRuleError


class ConcatBridge(Bridge):
    """The last h and c of all directions, side by side, as they are."""

    kind: Literal["concat"]

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        if b.types[h].width != width:
            given = b.types[h].width
            raise TypeRuleError(f"bridge gives {given} features, but the decoder's state has {width}")
        return {"h": h, "c": c}


class LinearBridge(Bridge):
    """A matrix, with a bias, from the last h of all directions, and another from c."""

    kind: Literal["linear"]

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        size = (width, b.types[h].width)
        return {name: affine(b, ref, name, size, shape, shape.matrix_init, True) for name, ref in (("h", h), ("c", c))}
