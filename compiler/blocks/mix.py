"""Mixes the residual stream with the embedded tokens at the start of a block."""

from typing import Literal

from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.init import constant
from specc.compiler.blocks.parts import Mix
from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.pointwise import Pointwise


class EmbeddedMix(Mix):
    """stream * x + embedded * x0 for the embedded tokens x0. Both factors are learned per feature: `stream` from 1,
    `embedded` from 0."""

    kind: Literal["embedded"]

    def lower(self, b: Builder, x: str, embedded: str, shape: Shape) -> str:
        features = TensorType((shape.dim,), shape.dtype)
        factors = b.param("stream", features, constant(1.0)), b.param("embedded", features, constant(0.0))
        mixed = Pointwise(("stream * x + embedded * x0",), ("x", "x0", "stream", "embedded"))
        return b.add("x", mixed, (x, embedded, *factors))
