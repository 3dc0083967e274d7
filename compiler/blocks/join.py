"""Stages that concatenate values or apply dropout."""

from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Stage
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.sequence import Concat
from specc.compiler.strict import Name


class ConcatStage(Stage):
    """Concatenates the features of the input and of the earlier stage `beside`, in that order.

    Attributes:
        beside: the name of the earlier stage.
    """

    kind: Literal["concat"]
    beside: Name

    @property
    def reads(self) -> str | None:
        return self.beside

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        return Lowered(b.add("x", Concat(), (x, context.values[self.beside])))


class DropoutStage(Stage):
    """Drops features in training (Srivastava et al., 2014).

    Attributes:
        p: the probability that a feature is dropped.
    """

    kind: Literal["dropout"]
    p: Annotated[float, Field(gt=0, lt=1)]

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        return Lowered(b.add("x", Dropout(self.p), (x,)) if context.training else x)
