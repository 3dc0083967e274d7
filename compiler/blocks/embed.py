"""The token embedding of an encoder or a decoder."""

from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Stage, Trait
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import COMPUTE
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.positions import Sinusoid
from specc.compiler.ops.shape import Embedding
from specc.compiler.programs.init import Init
from specc.compiler.strict import Positive


class EmbedStage(Stage):
    """The first stage of an encoder or a decoder. Looks up a learned row for each id in a table [V, D].

    Attributes:
        dim: the number of features D.
        positions: the position features that are added: rows of a learned table [context, D], or sinusoids.
        dropout: the probability that a feature is dropped in training.
        init: the initialization of the table. By default, the model's `init`.
    """

    kind: Literal["embed"]
    dim: Positive
    positions: Literal["learned", "sinusoidal"] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init: Init | None = None

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"starts"} if self.positions is None else {"starts", "reads_positions"})

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        init, dim = self.init or shape.matrix_init, shape.size("D", self.dim, "features", b.scope.replace(".", "_"))
        table = b.param("token", shape.activation(shape.vocab, dim), init)
        y = b.add("token", Embedding(), (context.ids, table))
        if self.positions == "learned":
            rows = b.param("positions", shape.activation(shape.context, dim), init)
            place = b.add("place", Embedding(), (context.positions, rows))
        elif self.positions == "sinusoidal":
            place = b.add("place", Sinusoid(self.dim, COMPUTE), (context.positions,))
        if self.positions is not None:
            y = pointwise(b, "x", "x + place", x=y, place=place)
        return Lowered(y)
