"""Additive attention to the source. The query is the state of the decoder."""

from collections.abc import Iterator, Mapping
from typing import Literal

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Stage, Trait
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.additive import Additive
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.sequence import AsStep
from specc.compiler.strict import Name, Positive, Problem


class AdditiveStage(Stage):
    """The mean of the encoder's values, weighted by the softmax of scores (Bahdanau, Cho and Bengio, 2015).

    The query h is the last h of the recurrent stage `query`. The score of a position is relu(w . [h; value] + b). With
    `form: tanh`, the score is w . tanh(W h + U value + b), and the argument of tanh has `width` features.

    Attributes:
        query: the name of the recurrent stage with the query h.
        form: the formula of the score.
        width: with `form: tanh`, the number of features to which tanh is applied.
    """

    kind: Literal["additive"]
    query: Name
    form: Literal["relu", "tanh"] = "relu"
    width: Positive = 1

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"reads_source"})

    @property
    def query_stage(self) -> str | None:
        return self.query

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        if self.form == "relu" and self.width != 1:
            message = "`width` applies only to `form: tanh`, but `form` is relu"
            yield Problem(("width",), "S232", message, "remove `width`, or use `form: tanh`")

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        keys, values = shape.activation("B", "S", self.width), shape.activation("B", "S", shape.source)
        return {"keys": keys, "values": values}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        size = (self.width, b.types[context.memory].width)
        keys = affine(b, context.memory, "key", size, shape, True)
        return {"keys": keys, "values": context.memory}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        h = b.add("h", AsStep(), (context.initial["h"],))
        weight = b.param("query", shape.activation(self.width, b.types[h].width), shape.matrix_init)
        query = b.add("query", Linear(), (h, weight))
        scale = []
        if self.form == "tanh":
            scale = [b.param("score", shape.activation(self.width), shape.matrix_init)]
        cache = context.cache
        return Lowered(b.add("y", Additive(self.form), (query, cache["keys"], cache["values"], context.seen, *scale)))
