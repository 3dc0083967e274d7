"""Value embeddings: what the token itself adds to the values that attention reads."""

from dataclasses import dataclass

from specc.compiler.blocks.context import Shape, Shared, Tokens
from specc.compiler.blocks.init import Init, constant
from specc.compiler.blocks.parts import LayerList
from specc.compiler.ir.graph import Builder
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import Embedding
from specc.compiler.strict import Positive, StrictModel


class ValueEmbedding(StrictModel):
    """scale * P E[id] for one table E [V, dim], matrix P and learned number, from `scale`, for all of `layers` (counted
    from 0; all where unset); each adds it to its values by a learned number, from 1."""

    dim: Positive
    layers: LayerList | None = None
    scale: float = 0.1
    init: Init = Init(normal=0.01)

    def table(self, title: str, features: int, shape: Shape) -> "ValueTable":
        """What the layers named `title` share, of as many features as their values have."""
        return ValueTable(
            f"{title}_values", (f"{title}_values",), self.layers, spec=self, features=features, shape=shape
        )


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
