"""Bridges, which compute the decoder's initial state from the encoder's last state."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.parts import Bridge
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TypeRuleError


class ConcatBridge(Bridge):
    """Concatenates the last h of all directions, and the last c of all directions."""

    kind: Literal["concat"]

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        if b.types[h].width != width:
            features = b.types[h].width
            raise TypeRuleError(f"the bridge returns {features} features, but the decoder's state has {width}")
        return {"h": h, "c": c}


class LinearBridge(Bridge):
    """Applies one matrix with bias to the last h, and another matrix with bias to the last c. h and c are concatenated
    over all directions."""

    kind: Literal["linear"]

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        size = (width, b.types[h].width)
        return {name: affine(b, ref, name, size, shape, True) for name, ref in (("h", h), ("c", c))}
