"""The dense feed-forward layer, with any activation of the pointwise language."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Layer
from specc.compiler.expr import parse, variables
from specc.compiler.ir.graph import Builder
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.strict import Name, Positive, PositiveFloat, Problem, StrictModel, later

OPERANDS = ("x", "gate")


def _activation(text: str) -> str:
    if "x" not in variables(parse(text, OPERANDS)):
        raise ValueError("an activation must read x")
    return text


Expression = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_activation)]


class NamedActivation(StrictModel):
    """An activation with an explicit name for its kernels, for activations that would otherwise have the same name.

    Attributes:
        expr: the expression, in `x` and `gate`.
        name: the name in the files and symbols of its kernels.
    """

    expr: Expression
    name: Name


class Mlp(Layer):
    """down(act(up(x))), or down(act(up(x), gate(x))) if the activation reads `gate` (Shazeer, 2020).

    Attributes:
        ratio: the inner features as a multiple of the model's. Exactly one of `ratio` and `hidden` is set.
        hidden: the inner features.
        act: the activation: an expression in `x` and `gate`, or one with a name.
        bias: whether the matrices have a bias, or those that have one.
    """

    kind: Literal["mlp"]
    ratio: PositiveFloat | None = None
    hidden: Positive | None = None
    act: Expression | NamedActivation
    bias: bool | Annotated[tuple[Literal["up", "gate", "down"], ...], Field(min_length=1, max_length=3)] = later(False)

    @property
    def expression(self) -> str:
        return self.act if isinstance(self.act, str) else self.act.expr

    def width(self, dim: int) -> int:
        return self.hidden or round(dim * (self.ratio or 0))

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        if self.ratio is not None and self.hidden is not None:
            hint = "remove one of the two; each sets the width"
            yield Problem(("hidden",), "S214", "mlp has both ratio and hidden", hint, (("the ratio", ("ratio",)),))
        elif self.ratio is None and self.hidden is None:
            yield Problem((), "S214", "mlp needs exactly one of ratio and hidden", "e.g. `ratio: 4`")
        elif self.ratio is not None and dim * self.ratio != round(dim * self.ratio):
            message = f"ratio {self.ratio:g} times dim {dim} is {dim * self.ratio:g}, which is not a whole number"
            yield Problem(("ratio",), "S215", message, "choose another ratio, or set hidden")
        elif self.width(dim) > 2**20:
            key = "ratio" if self.hidden is None else "hidden"
            message = f"a width of {self.width(dim):,} is more than 1,048,576"
            yield Problem((key,), "S215", message, f"choose a smaller {key}")

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        width = shape.size("E", int(self.width(shape.dim)), "features inside the MLP", self.title)
        read = variables(parse(self.expression))
        operands = tuple(operand for operand in OPERANDS if operand in read)
        sources = {"x": "up", "gate": "gate"}
        values = []
        for operand in operands:
            name = sources[operand]
            values.append(affine(b, x, name, (width, shape.dim), shape, shape.matrix_init, self.bias))
        label = "" if isinstance(self.act, str) else self.act.name
        act = b.add("act", Pointwise((self.expression,), operands, title=label), values)
        return Lowered(affine(b, act, "down", (shape.dim, width), shape, shape.output_init, self.bias))
