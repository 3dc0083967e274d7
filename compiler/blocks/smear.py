"""SmearGate: adds a learned share of the previous token to each embedded token, in two forms."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Embed
from specc.compiler.blocks.previous import TokenId, previous
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.shape import FirstFeatures
from specc.compiler.programs.init import constant
from specc.compiler.strict import Positive


class Smear(Embed):
    """(1 - g) x + g p, where p is the value of the previous token. g is the sigmoid of one learned number per feature.
    This number is initially 0, so g is initially 0.5. p is 0 at the first token.

    Attributes:
        bos: the id that begins a document. p is also 0 at each token with that id.
    """

    kind: Literal["smear"]
    bos: TokenId | None = None

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        return {"previous": shape.activation("B", 1, shape.dim)}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        before, state = previous(b, x, "smear", context, self.bos)
        gate = b.param("smear.gate", shape.activation(b.types[x].width), constant(0.0))
        text = "x + sigmoid(gate) * (previous - x)"
        return Lowered(pointwise(b, "smear", text, x=x, previous=before, gate=gate), state)


class SmearByToken(Embed):
    """x + scale * sigmoid(w . x[:features]) p, where p is the value of the previous token (after modded-nanogpt).

    `scale` is one learned number. `scale` and `w` are initially 0. p is 0 at the first token.

    Attributes:
        features: the number of features in `x[:features]`.
        bos: the id that begins a document. p is also 0 at each token with that id.
    """

    kind: Literal["smear_by_token"]
    features: Positive = 12
    bos: TokenId | None = None

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        return {"previous": shape.activation("B", 1, shape.dim)}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        title = "smear_by_token"
        before, state = previous(b, x, title, context, self.bos)
        read = b.add(f"{title}.read", FirstFeatures(self.features), (x,))
        weight = b.param(f"{title}.gate", shape.activation(1, self.features), constant(0.0))
        gate = b.add(f"{title}.gate", Linear(), (read, weight))
        scale = b.param(f"{title}.scale", shape.activation(1), constant(0.0))
        text = "x + scale * sigmoid(gate) * previous"
        return Lowered(pointwise(b, title, text, x=x, previous=before, gate=gate, scale=scale), state)
