"""Embeddings of token pairs: adds features of the last two tokens to the embedding."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Embed
from specc.compiler.blocks.previous import TokenId, previous
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.hash import BigramHash
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.shape import Embedding
from specc.compiler.programs.init import Init, constant
from specc.compiler.strict import Positive


class Bigram(Embed):
    """BigramHash: `x + scale * P E[bucket]`, where E is a table, P is a matrix, and `scale` is a learned number.

    The bucket is a hash of the token and the previous token. The first token is in the last bucket.

    Attributes:
        buckets: the number of rows of the table E.
        dim: the number of columns of the table E.
        scale: the initial value of the learned number.
        init: the initialization of E.
        bos: the id that begins a document. A token with this id is treated as a first token.
    """

    kind: Literal["bigram"]
    buckets: Annotated[int, Field(ge=2, le=2**24)]
    dim: Positive
    scale: float = 0.05
    init: Init = constant(0.0)
    bos: TokenId | None = None

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        return {"previous": TensorType(("B", 1), "i64")}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        before, state = previous(b, context.ids, "bigram", context, self.bos, fill=-1)
        buckets = shape.size("BUCKETS", self.buckets, "pairs of tokens")
        dim = shape.size("BIGRAM", self.dim, "features of a pair")
        bucket = b.add("bigram.bucket", BigramHash(buckets), (context.ids, before))
        table = b.param("bigram.table", shape.activation(buckets, dim), self.init)
        rows = b.add("bigram.rows", Embedding(), (bucket, table))
        weight = b.param("bigram.project", shape.activation(b.types[x].width, dim), shape.matrix_init)
        pair = b.add("bigram.project", Linear(), (rows, weight))
        scale = b.param("bigram.scale", shape.activation(1), constant(self.scale))
        return Lowered(pointwise(b, "bigram", "x + scale * bigram", x=x, bigram=pair, scale=scale), state)
