"""The output head: computes logits from features."""

from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import Shape
from specc.compiler.changing_values import SegmentSchedule, last
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.programs.init import Init, constant, reading
from specc.compiler.strict import ExprText, StrictModel, Unit

# A cap above 1e4 has no effect, because no logit comes near the cap. Such a cap is also inexact, because some kernels
# compute tanh of small arguments with cancellation.
Cap = Annotated[float, Field(gt=0, le=1e4)]


LogitExpression = Annotated[ExprText, reading("z", "the expression must read z, the logits")]


class CapSchedule(SegmentSchedule):
    """A softcap that changes during training."""

    at: Annotated[tuple[tuple[Unit, Cap | LogitExpression], ...], Field(min_length=1, max_length=16)]


class LogitHead(StrictModel):
    """The output head: one matrix from features to the vocabulary.

    Attributes:
        tied: whether the matrix is the token table (Press and Wolf, 2017).
        softcap: a number that limits the logits z to softcap * tanh(z / softcap), or an expression of z. Examples are
            `30 * sigmoid(z / 7.5)`, and `z / 8` for a scale. Numbers and expressions may have a schedule.
        bias: whether a learned vector is added to the logits.
        init: the initialization of the matrix. By default, the model's `init`.
    """

    tied: bool = True
    softcap: Cap | LogitExpression | CapSchedule | None = None
    bias: bool = False
    init: Init | None = None

    def lower(self, b: Builder, x: str, shape: Shape, embedding: str, title: str = "") -> str:
        """Adds the nodes of the head, and returns the logits, f32[..., V].

        Args:
            b: The builder of the program.
            x: The last block's output, [..., D].
            shape: The sizes of the model.
            embedding: The reference of the token table's parameter, [V, D].
            title: The name of the softcap in kernel names. By default, the name of the softcap's function.
        """
        weight = embedding
        if not self.tied:
            weight = b.param("logits", shape.activation(shape.vocab, shape.dim), self.init or shape.matrix_init)
        logits = b.add("logits", Linear(), (x, weight))
        if self.bias:
            vector = b.param("logits_bias", shape.activation(shape.vocab), constant(0.0))
            logits = pointwise(b, "logits.biased", "z + bias", z=logits, bias=vector)
        cap = last(self.softcap) or "z"
        text = cap if isinstance(cap, str) else f"{cap!r} * tanh(z / {cap!r})"
        name = "logits.f32" if self.softcap is None else "softcap"
        return pointwise(b, name, text, dtype="f32", title=title, z=logits)
