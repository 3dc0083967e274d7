"""Value embeddings: a learned embedding of each token that is added to the values of attention."""

from dataclasses import dataclass, replace

from specc.compiler.blocks.context import Shape, Shared, Tokens
from specc.compiler.blocks.init import Init, constant
from specc.compiler.ir.graph import Builder
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import Embedding
from specc.compiler.strict import Positive, StrictModel


class ValueEmbedding(StrictModel):
    """scale * P E[id] for a table E [V, dim], a matrix P, and a learned number from `scale`, all shared by the
    layers that have equal value embeddings. Each layer adds the result to its values, times a learned number from 1.

    Attributes:
        dim: the columns of E.
        scale: the initial value of the learned number.
        init: the initialization of E.
    """

    dim: Positive
    scale: float = 0.1
    init: Init = Init(normal=0.01)

    def table(self, title: str, features: int, shape: Shape) -> "ValueTable":
        """Returns the computation that the layers named `title` share, with `features` output features."""
        name = f"{title}_values"
        return ValueTable(name, (name,), spec=self, features=features, shape=replace(shape, layer=0))


@dataclass(frozen=True, slots=True)
class ValueTable(Shared):
    """The value embedding of each token, [B, T, features]."""

    spec: ValueEmbedding | None = None
    features: int = 0
    shape: Shape | None = None

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        spec, shape = self.spec, self.shape
        assert spec is not None and shape is not None
        dim = shape.size("VALUES", spec.dim, "features of a value embedding", self.name)
        table = b.param(f"{self.name}.table", shape.activation(shape.vocab, dim), spec.init)
        rows = b.add(f"{self.name}.rows", Embedding(), (tokens.ids, table))
        weight = b.param(f"{self.name}.project", shape.activation(self.features, dim), shape.matrix_init)
        projected = b.add(f"{self.name}.project", Linear(), (rows, weight))
        scale = b.param(f"{self.name}.scale", shape.activation(1), constant(spec.scale))
        return (b.add(self.name, Pointwise(("scale * x",), ("x", "scale")), (projected, scale)),)
