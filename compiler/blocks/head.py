"""The output head: computes logits from features."""

from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.init import Init, constant
from specc.compiler.blocks.parts import Head
from specc.compiler.ir.graph import Builder
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise

# A larger cap is useless, as no logit comes near it, and inexact: tanh of arguments that small loses precision
# to cancellation in some kernels.
Cap = Annotated[float, Field(gt=0, le=1e4)]


class LogitHead(Head):
    """One matrix to the vocabulary.

    Attributes:
        tied: whether the matrix is the token table itself (Press and Wolf, 2017).
        softcap: limits logits z to softcap * tanh(z / softcap), which is within +-softcap.
        bias: whether a learned vector is added to the logits.
        init: the initialization of the matrix; the model's if unset.
    """

    tied: bool = True
    softcap: Cap | None = None
    bias: bool = False
    init: Init | None = None

    def lower(self, b: Builder, x: str, shape: Shape, embedding: str) -> str:
        weight = embedding
        if not self.tied:
            weight = b.param("logits", shape.activation(shape.vocab, shape.dim), self.init or shape.matrix_init)
        logits = b.add("logits", Linear(), (x, weight))
        if self.bias:
            vector = b.param("logits_bias", shape.activation(shape.vocab), constant(0.0))
            logits = b.add("logits.biased", Pointwise(("z + bias",), ("z", "bias")), (logits, vector))
        cap = f"{self.softcap!r} * tanh(z / {self.softcap!r})" if self.softcap is not None else "z"
        return b.add(
            "softcap" if self.softcap is not None else "logits.f32", Pointwise((cap,), ("z",), dtype="f32"), (logits,)
        )
