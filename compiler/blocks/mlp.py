"""The dense feed-forward layer with any pointwise activation, and the fields of all feed-forward layers."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.affine import affine
from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.parts import Layer
from specc.compiler.expr import ExprError, number, parse, variables
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.programs.init import reading
from specc.compiler.strict import ExprText, Name, Positive, PositiveFloat, Problem, StrictModel, accepted_by, later

SOURCES = {"x": "up", "gate": "gate"}  # the operands of an activation, each with the matrix product that computes it
# Points at which activations are checked. No common function has a kink there.
OPERANDS = (-7.3, -2.9, -0.83, 0.71, 3.1, 7.3)
_RATIO = ("the ratio", ("ratio",))


def _check_values(text: str) -> None:
    """Raises ExprError if an activation is undefined for usual results of matrix products, which have both signs. The
    loss would be NaN from the first step on."""
    expr = parse(text)
    for operands in product(OPERANDS, repeat=2):
        at = {name: value for name, value in zip(SOURCES, operands, strict=True) if name in variables(expr)}
        try:
            number(expr, **at)
        except ExprError as error:
            place = " and ".join(f"{name} = {value:g}" for name, value in at.items())
            hint = "define it for all operands, for example by `relu`, `abs` or `where` around what is undefined"
            raise ExprError(f"the activation has no value at {place}, where {error.message}", hint=hint) from None


Expression = Annotated[ExprText, reading("x", "an activation must read x", "gate"), accepted_by(_check_values)]


class NamedActivation(StrictModel):
    """An activation with a kernel name, for a model in which two activations would have the same kernel name.

    Attributes:
        expr: the expression of `x` and `gate`.
        name: the name in files and symbols of kernels.
    """

    expr: Expression
    name: Name


class FeedForward(Layer):
    """The fields of layers that compute down(act(up(x))), or down(act(up(x), gate(x))) if the activation reads `gate`
    (Shazeer, 2020).

    Attributes:
        ratio: the number of inner features divided by the number of features of the model. Exactly one of `ratio` and
            `hidden` is set.
        hidden: the number of inner features.
        act: the activation: an expression of `x` and `gate`, optionally with a name.
    """

    kind: str
    ratio: PositiveFloat | None = None
    hidden: Positive | None = None
    act: Expression | NamedActivation

    @property
    def expression(self) -> str:
        return self.act if isinstance(self.act, str) else self.act.expr

    def width(self, dim: int) -> int:
        return self.hidden or round(dim * (self.ratio or 0))

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        dim = shape.dim
        if self.ratio is not None and self.hidden is not None:
            hint = "remove one of the two; a change removes the field of all blocks by null, for example `ratio: null`"
            yield Problem(("hidden",), "S214", f"{self.kind} has both `ratio` and `hidden`", hint, (_RATIO,))
        elif self.ratio is None and self.hidden is None:
            yield Problem((), "S214", f"{self.kind} needs exactly one of `ratio` and `hidden`", "e.g. `ratio: 4`")
        elif self.ratio is not None and dim * self.ratio != round(dim * self.ratio):
            message = f"`ratio` {self.ratio:g} times `dim` {dim} is {dim * self.ratio:g}, which is not a whole number"
            yield Problem(("ratio",), "S215", message, "choose another ratio, or set `hidden`")
        elif self.width(dim) > 2**20:
            key = "ratio" if self.hidden is None else "hidden"
            message = f"the hidden width is {self.width(dim):,}; it may be at most 1,048,576"
            yield Problem((key,), "S215", message, f"choose a smaller `{key}`")

    def activated(self, b: Builder, product: Callable[[str], str]) -> str:
        """Adds the matrix products and the activation. Returns the result of the activation.

        Args:
            b: The builder of the function.
            product: A function that adds the matrix product `up` or `gate` of the layer's input, and returns the result
                [..., E].
        """
        read, label = variables(parse(self.expression)), "" if isinstance(self.act, str) else self.act.name
        values = {operand: product(source) for operand, source in SOURCES.items() if operand in read}
        return pointwise(b, "act", self.expression, title=label, **values)


class Mlp(FeedForward):
    """down(act(up(x))), or down(act(up(x), gate(x))) if the activation reads `gate` (Shazeer, 2020).

    Attributes:
        bias: whether the matrices have a bias, or a list of the matrices with a bias.
    """

    kind: Literal["mlp"]
    bias: bool | Annotated[tuple[Literal["up", "gate", "down"], ...], Field(min_length=1, max_length=3)] = later(False)

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        width = shape.size("E", int(self.width(shape.dim)), "MLP features", self.title)

        def product(name: str) -> str:
            return affine(b, x, name, (width, shape.dim), shape, self.bias)

        act = self.activated(b, product)
        return Lowered(affine(b, act, "down", (shape.dim, width), shape, self.bias, shape.output_init))
