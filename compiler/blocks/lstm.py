"""Recurrent stages: the LSTM, and a stage that repeats the encoder's last state for a recurrent decoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Stage, Trait
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.recurrent import GATES, Lstm, LstmCell
from specc.compiler.ops.sequence import AsStep, Repeat, Reversed, Zeros
from specc.compiler.programs.init import Init, constant
from specc.compiler.strict import Positive

SPREAD = Init(uniform="2/sqrt(fan_out)")  # equals 1 / sqrt(hidden), because the matrix has 4 * hidden rows


class LstmStage(Stage):
    """One layer of long short-term memory (Hochreiter and Schmidhuber, 1997).

    Attributes:
        hidden: the number of features H per direction.
        directions: the directions in which tokens are read. With `both`, the features of both directions are
            concatenated.
        biases: the number of bias vectors per direction: 1, or 2 as in most libraries.
        gates: the order of the input, forget, cell and output gates in the matrices [4H, D] and [4H, H].
        dropout: the probability that a feature of the output is dropped in training.
        init: the initialization of the matrices. By default, uniform in +-1 / sqrt(`hidden`).
    """

    kind: Literal["lstm"]
    hidden: Positive
    directions: Literal["forward", "backward", "both"] = "forward"
    biases: Annotated[int, Field(ge=1, le=2)] = 1
    gates: Literal["ifgo"] = "ifgo"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init: Init | None = None

    @property
    def width(self) -> int:
        return self.hidden * (2 if self.directions == "both" else 1)

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"recurrent"} if self.directions == "forward" else {"recurrent", "reads_future"})

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        state = shape.activation("B", self.width)
        return {"h": state, "c": state}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        if context.initial:
            return context.initial
        return {name: b.add(f"{name}.zero", Zeros((self.width,)), (context.memory,)) for name in ("h", "c")}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        start = context.cache or self.begin(b, shape, replace(context, memory=context.memory or x))
        weights = [
            weight
            for side in (("", "back_") if self.directions == "both" else ("",))
            for weight in self._weights(b, side, shape)
        ]
        if context.cache:
            cell = b.add("cell", LstmCell(self.biases), (x, start["h"], start["c"], *weights))
            y = b.add("y", AsStep(), (cell,))
            return Lowered(y, {"h": cell, "c": f"{cell}:1"})
        if self.directions == "backward":
            x = b.add("x.reversed", Reversed(), (x,))
        op = Lstm(2 if self.directions == "both" else 1, self.biases)
        y = output = b.add("lstm", op, (x, start["h"], start["c"], *weights))
        if self.directions == "backward":
            y = b.add("y.reversed", Reversed(), (output,))
        return Lowered(y, {"h": f"{output}:1", "c": f"{output}:2"})

    def _weights(self, b: Builder, side: str, shape: Shape) -> list[str]:
        rows, init = GATES * self.hidden, self.init or SPREAD
        weights = [b.param(f"{side}input", shape.activation(rows, shape.dim), init)]
        weights.append(b.param(f"{side}hidden", shape.activation(rows, self.hidden), init))
        names = ("bias",) if self.biases == 1 else ("input_bias", "hidden_bias")
        return [*weights, *(b.param(f"{side}{name}", shape.activation(rows), constant(0.0)) for name in names)]


class RepeatStage(Stage):
    """Repeats the encoder's last h at every position.

    A decoder that begins with this stage reads no tokens. Such a decoder writes all tokens of a line at once
    (non-autoregressive).
    """

    kind: Literal["repeat"]

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"starts", "reads_final"})

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        return {"h": shape.activation("B", shape.dim)}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        return {"h": context.final["h"]}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        state = context.cache or self.begin(b, shape, context)
        return Lowered(b.add("x", Repeat(), (state["h"], context.ids)))
