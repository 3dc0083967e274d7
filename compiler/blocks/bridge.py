"""Bridges: compute the decoder's initial state from the encoder's last state."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.parts import Bridge
from specc.compiler.ir.graph import Builder, TypeRuleError


class ConcatBridge(Bridge):
    """Returns the last h and c of all directions, concatenated and otherwise unchanged."""

    kind: Literal["concat"]

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        if b.types[h].width != width:
            given = b.types[h].width
            raise TypeRuleError(f"the bridge gives {given} features, but the decoder's state has {width}")
        return {"h": h, "c": c}


class LinearBridge(Bridge):
    """Applies one matrix with bias to the last h of all directions, and another to c."""

    kind: Literal["linear"]

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        size = (width, b.types[h].width)
        return {name: affine(b, ref, name, size, shape, shape.matrix_init, True) for name, ref in (("h", h), ("c", c))}
